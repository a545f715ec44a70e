//! The part of HIP's runtime API that flashd calls, resolved by name from the library found at run time.
//!
//! The declarations are those of ROCm 6 and 7 (hip_runtime_api.h); handles are opaque pointers and error codes plain
//! numbers, so that a newer library may return codes that this build does not know.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::device::DeviceError;

/// An opaque handle.
pub type Handle = *mut c_void;

/// `hipError_t`.
pub type Code = c_int;

/// `hipSuccess`.
pub const SUCCESS: Code = 0;
/// `hipErrorOutOfMemory`.
pub const OUT_OF_MEMORY: Code = 2;
/// `hipErrorNoDevice`.
pub const NO_DEVICE: Code = 100;
/// `hipErrorNotFound`: no kernel of that name.
pub const NOT_FOUND: Code = 500;

/// `hipMemcpyHostToDevice`.
pub const HOST_TO_DEVICE: c_int = 1;
/// `hipMemcpyDeviceToHost`.
pub const DEVICE_TO_HOST: c_int = 2;
/// `hipMemcpyDeviceToDevice`.
pub const DEVICE_TO_DEVICE: c_int = 3;

/// `hipDeviceAttributeComputeCapabilityMajor`: of gfx942, 9.
pub const ATTRIBUTE_MAJOR: c_int = 23;
/// `hipDeviceAttributeComputeCapabilityMinor`: of gfx942, 4.
pub const ATTRIBUTE_MINOR: c_int = 61;
/// `hipDeviceAttributeMultiprocessorCount`.
pub const ATTRIBUTE_MULTIPROCESSORS: c_int = 63;
/// `hipDeviceAttributeWarpSize`.
pub const ATTRIBUTE_WAVE: c_int = 87;

/// `hipStreamNonBlocking`: the stream does not wait for the default stream.
pub const STREAM_NON_BLOCKING: c_uint = 1;
/// `hipStreamCaptureModeThreadLocal`: calls of other threads are not concerned by a recording.
pub const CAPTURE_THREAD_LOCAL: c_int = 1;

/// `HIP_LAUNCH_PARAM_BUFFER_POINTER`: the argument's address follows.
pub const LAUNCH_POINTER: Handle = std::ptr::without_provenance_mut(1);
/// `HIP_LAUNCH_PARAM_BUFFER_SIZE`: the address of the argument's size follows.
pub const LAUNCH_BYTES: Handle = std::ptr::without_provenance_mut(2);
/// `HIP_LAUNCH_PARAM_END`.
pub const LAUNCH_END: Handle = std::ptr::without_provenance_mut(3);

/// The names that ROCm's packages give the library; the one without a number is in development packages.
pub const LIBRARY_NAMES: [&str; 3] = ["libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"];

macro_rules! api {
    ($($(#[$doc:meta])* $field:ident = $symbol:literal: fn($($name:ident: $arg:ty),* $(,)?) -> $ret:ty;)*) => {
        /// Functions of the loaded library.
        pub struct Api {
            $($(#[$doc])* pub $field: unsafe extern "C" fn($($name: $arg),*) -> $ret,)*
            /// Where it was found.
            pub path: PathBuf,
            /// Keeps the functions loaded.
            _library: Library,
        }

        impl Api {
            fn resolve(label: &str, path: PathBuf, library: Library) -> Result<Self, DeviceError> {
                Ok(Self {
                    $($field: symbol(label, &path, &library, $symbol)?,)*
                    path,
                    _library: library,
                })
            }
        }
    };
}

api! {
    /// Number of devices.
    device_count = "hipGetDeviceCount": fn(count: *mut c_int) -> Code;
    /// Makes a device current on this thread.
    set_device = "hipSetDevice": fn(device: c_int) -> Code;
    /// One attribute.
    device_attribute = "hipDeviceGetAttribute": fn(value: *mut c_int, attribute: c_int, device: c_int) -> Code;
    /// The device's name.
    device_name = "hipDeviceGetName": fn(name: *mut c_char, len: c_int, device: c_int) -> Code;
    /// The runtime's version.
    runtime_version = "hipRuntimeGetVersion": fn(version: *mut c_int) -> Code;
    /// Free and total device memory.
    mem_get_info = "hipMemGetInfo": fn(free: *mut usize, total: *mut usize) -> Code;
    /// Takes device memory.
    malloc = "hipMalloc": fn(address: *mut Handle, n_bytes: usize) -> Code;
    /// Gives device memory back.
    free = "hipFree": fn(address: Handle) -> Code;
    /// Takes pinned memory.
    host_malloc = "hipHostMalloc": fn(address: *mut Handle, n_bytes: usize, flags: c_uint) -> Code;
    /// Gives pinned memory back.
    host_free = "hipHostFree": fn(address: Handle) -> Code;
    /// Copies.
    memcpy = "hipMemcpyAsync": fn(to: Handle, from: *const c_void, n_bytes: usize, kind: c_int, stream: Handle) -> Code;
    /// Sets bytes.
    memset = "hipMemsetAsync": fn(to: Handle, byte: c_int, n_bytes: usize, stream: Handle) -> Code;
    /// Makes a stream.
    stream_create = "hipStreamCreateWithFlags": fn(stream: *mut Handle, flags: c_uint) -> Code;
    /// Gives a stream back.
    stream_destroy = "hipStreamDestroy": fn(stream: Handle) -> Code;
    /// Waits for a stream.
    stream_synchronize = "hipStreamSynchronize": fn(stream: Handle) -> Code;
    /// Begins a recording.
    begin_capture = "hipStreamBeginCapture": fn(stream: Handle, mode: c_int) -> Code;
    /// Ends a recording.
    end_capture = "hipStreamEndCapture": fn(stream: Handle, graph: *mut Handle) -> Code;
    /// Makes an event.
    event_create = "hipEventCreateWithFlags": fn(event: *mut Handle, flags: c_uint) -> Code;
    /// Gives an event back.
    event_destroy = "hipEventDestroy": fn(event: Handle) -> Code;
    /// Records an event.
    event_record = "hipEventRecord": fn(event: Handle, stream: Handle) -> Code;
    /// Waits for an event.
    event_synchronize = "hipEventSynchronize": fn(event: Handle) -> Code;
    /// Time between events.
    event_elapsed = "hipEventElapsedTime": fn(ms: *mut f32, from: Handle, to: Handle) -> Code;
    /// Loads a code object.
    module_load = "hipModuleLoadData": fn(module: *mut Handle, image: *const c_void) -> Code;
    /// Unloads a code object.
    module_unload = "hipModuleUnload": fn(module: Handle) -> Code;
    /// Looks a kernel up.
    module_function = "hipModuleGetFunction": fn(function: *mut Handle, module: Handle, name: *const c_char) -> Code;
    /// Starts a kernel.
    launch = "hipModuleLaunchKernel": fn(
        function: Handle,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: Handle,
        params: *mut Handle,
        extra: *mut Handle,
    ) -> Code;
    /// Makes a recording ready to run.
    graph_instantiate = "hipGraphInstantiate": fn(
        exec: *mut Handle,
        graph: Handle,
        error_node: *mut Handle,
        log: *mut c_char,
        log_bytes: usize,
    ) -> Code;
    /// Gives a recording back.
    graph_destroy = "hipGraphDestroy": fn(graph: Handle) -> Code;
    /// Runs a graph.
    graph_launch = "hipGraphLaunch": fn(exec: Handle, stream: Handle) -> Code;
    /// Gives a graph back.
    graph_exec_destroy = "hipGraphExecDestroy": fn(exec: Handle) -> Code;
    /// Forgets the last error of this thread.
    last_error = "hipGetLastError": fn() -> Code;
    /// Name of an error.
    error_name = "hipGetErrorName": fn(code: Code) -> *const c_char;
    /// Words of an error.
    error_string = "hipGetErrorString": fn(code: Code) -> *const c_char;
}

impl Api {
    /// Loads the library from one path.
    pub fn load(label: &str, path: &Path) -> Result<Self, DeviceError> {
        // SAFETY: the file is the runtime that the operator installed, or the build's own stand-in; its constructors are
        // trusted as those of a linked library are.
        let library = unsafe { Library::new(path) }.map_err(|error| missing(label, path, reason(&error)))?;
        Self::resolve(label, path.to_owned(), library)
    }

    /// Looks for the library in `folders`, then wherever the system's loader looks.
    pub fn find(label: &str, folders: &[PathBuf]) -> Result<Self, DeviceError> {
        let in_folders = folders.iter().flat_map(|folder| LIBRARY_NAMES.map(|name| folder.join(name)));
        let mut refusals = Vec::new();
        for path in in_folders.filter(|path| path.exists()).chain(LIBRARY_NAMES.map(PathBuf::from)) {
            // SAFETY: as in `load`.
            match unsafe { Library::new(&path) } {
                Ok(library) => return Self::resolve(label, path, library),
                Err(error) => refusals.push(reason(&error)),
            }
        }
        // The first refusal is of a library that is there, if one is.
        let reason = refusals.first().cloned().unwrap_or_default();
        let looked: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
        Err(missing(label, Path::new(LIBRARY_NAMES[0]), format!("{reason} (looked in {})", looked.join(", "))))
    }
}

/// What the system's loader said; the error itself only names the call.
fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

fn missing(label: &str, path: &Path, reason: String) -> DeviceError {
    DeviceError::LibraryMissing {
        device: label.to_owned(),
        library: path.display().to_string(),
        reason,
        remedy: "install ROCm 6 or 7's HIP runtime, or set ROCM_PATH or LD_LIBRARY_PATH to where it is".to_owned(),
    }
}

fn symbol<F: Copy>(label: &str, path: &Path, library: &Library, name: &str) -> Result<F, DeviceError> {
    // SAFETY: the table above gives every name the type that HIP's header declares for it.
    let found = unsafe { library.get::<F>(name) };
    found.map(|function| *function).map_err(|_| DeviceError::SymbolMissing {
        device: label.to_owned(),
        library: path.display().to_string(),
        symbol: name.to_owned(),
        remedy: "install ROCm 6 or 7".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_nowhere_is_named_with_the_places() {
        let error = Api::find("hip:0", &["/no/such/rocm/lib".into()]).err().unwrap();
        let text = error.to_string();
        assert!(matches!(error, DeviceError::LibraryMissing { .. }), "{text}");
        for part in ["hip:0", "libamdhip64.so", "/no/such/rocm/lib", "ROCM_PATH"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn a_library_that_is_there_but_broken_is_said_to_be_so() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("libamdhip64.so"), "not a library").unwrap();
        let text = Api::find("hip:0", &[folder.path().to_owned()]).err().unwrap().to_string();
        assert!(text.contains(&folder.path().join("libamdhip64.so").display().to_string()), "{text}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_library_without_the_symbols_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libamdhip64.so.6");
        let libc = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib/aarch64-linux-gnu/libc.so.6", "/lib64/libc.so.6"];
        std::os::unix::fs::symlink(libc.iter().find(|path| Path::new(path).exists()).unwrap(), &path).unwrap();
        let error = Api::find("hip:0", &[folder.path().to_owned()]).err().unwrap();
        assert!(
            matches!(&error, DeviceError::SymbolMissing { symbol, .. } if symbol == "hipGetDeviceCount"),
            "{error}"
        );
    }
}
