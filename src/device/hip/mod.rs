//! AMD GPUs through HIP's runtime, and the simulator through a stand-in for it.
#![allow(unsafe_code)] // src/device is the home of unsafe: here it is calls of a C library.

use std::ffi::{CStr, CString, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use super::driver::{
    Driver, Fault, FaultKind, Function, FunctionInfo, LaunchArgs, LaunchShape, Memory, RawEvent, RawGraph,
};
use super::{CodeObjects, DeviceError, DeviceInfo, DeviceKind};

mod api;
mod node;

use api::{Api, Code, Handle};

/// One device of HIP's runtime.
struct Hip {
    info: DeviceInfo,
    device: c_int,
    stream: Handle,
    module: Handle,
    /// The runtime may read the image after the module was loaded.
    _image: Vec<u8>,
    api: Api,
}

// SAFETY: stream and module are handles of the runtime, which takes them on any thread with their device current, as every
// call here makes it.
unsafe impl Send for Hip {}
// SAFETY: as for Send; HIP's functions may be called from several threads at once.
unsafe impl Sync for Hip {}

/// Opens a device and loads its code object.
pub(super) fn open(
    kind: DeviceKind,
    label: &str,
    ordinal: usize,
    code: &CodeObjects,
) -> Result<(Box<dyn Driver>, PathBuf), DeviceError> {
    let api = match kind {
        DeviceKind::Sim => Api::load(label, &code.sim_library()?)?,
        DeviceKind::Hip | DeviceKind::Cuda => Api::find(label, &code.library_folders)?,
    };
    let device = choose(&api, kind, label, ordinal)?;
    let no_device = |fault: Fault| DeviceError::NoDevice {
        device: label.to_owned(),
        reason: format!("{}: {}", fault.call, fault.text),
        remedy: format!("the HIP runtime is {}, version {}; see its messages", api.path.display(), version(&api)),
    };
    let arch = match kind {
        DeviceKind::Sim => code.sim_wave.arch().to_owned(),
        DeviceKind::Hip | DeviceKind::Cuda => arch(&api, device).map_err(no_device)?,
    };
    let mut info = describe(&api, device, arch).map_err(no_device)?;
    if kind == DeviceKind::Sim {
        // The stand-in does not know before it has seen the code object.
        info.wave = code.sim_wave.n_lanes();
    }
    let path = code.code_object(kind, &info.arch)?;
    let refused = |reason| DeviceError::CodeRefused {
        device: label.to_owned(),
        path: path.clone(),
        reason,
        remedy: format!("it must be built for {} by this version of flashd", info.arch),
    };
    let image = std::fs::read(&path).map_err(|error| refused(error.to_string()))?;
    let mut stream = std::ptr::null_mut();
    // SAFETY: the device is current on this thread since `describe`; the handle's place is writable.
    let code_of_call = unsafe { (api.stream_create)(&raw mut stream, api::STREAM_NON_BLOCKING) };
    succeed(&api, "hipStreamCreateWithFlags", code_of_call).map_err(no_device)?;
    let mut module = std::ptr::null_mut();
    // SAFETY: the image is a whole file that is kept as long as the module.
    let code_of_call = unsafe { (api.module_load)(&raw mut module, image.as_ptr().cast()) };
    if let Err(fault) = succeed(&api, "hipModuleLoadData", code_of_call) {
        // SAFETY: the stream was made above and is used by nothing.
        unsafe { (api.stream_destroy)(stream) };
        return Err(refused(fault.text));
    }
    Ok((Box::new(Hip { info, device, stream, module, _image: image, api }), path))
}

/// The device's number, when the runtime shows it.
fn choose(api: &Api, kind: DeviceKind, label: &str, ordinal: usize) -> Result<c_int, DeviceError> {
    let error = |reason: String, remedy: &str| DeviceError::NoDevice {
        device: label.to_owned(),
        reason,
        remedy: remedy.to_owned(),
    };
    let mut count = 0;
    // SAFETY: the count's place is writable.
    let code = unsafe { (api.device_count)(&raw mut count) };
    let result = succeed(api, "hipGetDeviceCount", code);
    if code == api::NO_DEVICE || (result.is_ok() && count == 0) || (result.is_err() && kind == DeviceKind::Hip) {
        let finding = node::diagnose(Path::new("/"));
        let said = result.err().map_or_else(String::new, |fault| format!(" (hipGetDeviceCount: {})", fault.text));
        return Err(error(format!("{}{said}", finding.reason), finding.remedy));
    }
    result.map_err(|fault| error(format!("hipGetDeviceCount: {}", fault.text), "see the runtime's messages"))?;
    match c_int::try_from(ordinal) {
        Ok(device) if device < count => Ok(device),
        _ => Err(error(
            format!("there is no device {ordinal}: the runtime shows {count}"),
            "HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES say which are shown",
        )),
    }
}

/// Makes the device current on this thread and asks what it is.
fn describe(api: &Api, device: c_int, arch: String) -> Result<DeviceInfo, Fault> {
    // SAFETY: the call takes a plain number.
    succeed(api, "hipSetDevice", unsafe { (api.set_device)(device) })?;
    let mut name = [0_u8; 256];
    // SAFETY: the name's place is writable for the length given.
    let code = unsafe { (api.device_name)(name.as_mut_ptr().cast(), name.len() as c_int, device) };
    succeed(api, "hipDeviceGetName", code)?;
    let name = CStr::from_bytes_until_nul(&name).map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    Ok(DeviceInfo {
        name,
        arch,
        wave: attribute(api, device, api::ATTRIBUTE_WAVE)?,
        n_multiprocessors: attribute(api, device, api::ATTRIBUTE_MULTIPROCESSORS)?,
        memory_bytes: memory(api)?.total_bytes,
    })
}

/// The architecture's name; hipDeviceProp_t has it too, but its layout moves between versions.
fn arch(api: &Api, device: c_int) -> Result<String, Fault> {
    let major = attribute(api, device, api::ATTRIBUTE_MAJOR)?;
    let minor = attribute(api, device, api::ATTRIBUTE_MINOR)?;
    // The stepping can't be asked for; every 9.4 on sale is gfx942, and the code object is refused on another.
    Ok(if (major, minor) == (9, 4) { "gfx942".to_owned() } else { format!("gfx{major}{minor}x") })
}

fn attribute(api: &Api, device: c_int, attribute: c_int) -> Result<u32, Fault> {
    let mut value = 0;
    // SAFETY: the value's place is writable.
    let code = unsafe { (api.device_attribute)(&raw mut value, attribute, device) };
    succeed(api, "hipDeviceGetAttribute", code)?;
    Ok(u32::try_from(value).unwrap_or(0))
}

fn memory(api: &Api) -> Result<Memory, Fault> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: both places are writable.
    succeed(api, "hipMemGetInfo", unsafe { (api.mem_get_info)(&raw mut free, &raw mut total) })?;
    Ok(Memory { free_bytes: free as u64, total_bytes: total as u64 })
}

fn version(api: &Api) -> c_int {
    let mut version = 0;
    // SAFETY: the version's place is writable.
    unsafe { (api.runtime_version)(&raw mut version) };
    version
}

fn succeed(api: &Api, call: &'static str, code: Code) -> Result<(), Fault> {
    if code == api::SUCCESS {
        return Ok(());
    }
    // SAFETY: it takes nothing; the runtime would report the error again at an unrelated call.
    unsafe { (api.last_error)() };
    // SAFETY: the runtime returns static strings, or null for codes it does not know.
    let text = |pointer: *const std::ffi::c_char| unsafe {
        if pointer.is_null() { String::new() } else { CStr::from_ptr(pointer).to_string_lossy().into_owned() }
    };
    // SAFETY: both take plain numbers.
    let (name, words) = unsafe { (text((api.error_name)(code)), text((api.error_string)(code))) };
    Err(Fault { kind: kind_of(code), call, text: format!("{name} ({code}): {words}") })
}

/// Codes of HIP that leave the device usable are few; any other means that work was lost.
const fn kind_of(code: Code) -> FaultKind {
    match code {
        api::OUT_OF_MEMORY => FaultKind::OutOfMemory,
        api::NOT_FOUND => FaultKind::NotFound,
        // Invalid value, configuration, symbol, image, no binary, handle, function; out of resources for a launch; not
        // supported; the errors of stream capture (900 to 908) and of graph updates.
        1 | 9 | 13 | 98 | 200 | 209 | 218 | 300 | 301 | 302 | 303 | 400 | 701 | 801 | 900..=908 | 910 => {
            FaultKind::Refused
        }
        _ => FaultKind::Lost,
    }
}

impl Hip {
    /// Makes the device current on this thread, then calls.
    fn call(&self, name: &'static str, call: impl FnOnce() -> Code) -> Result<(), Fault> {
        // SAFETY: the call takes a plain number.
        succeed(&self.api, "hipSetDevice", unsafe { (self.api.set_device)(self.device) })?;
        succeed(&self.api, name, call())
    }

    /// A call that gives something back. It is made on a lost device too, and an error leaves nothing to do.
    fn release(&self, call: impl FnOnce() -> Code) {
        // SAFETY: the call takes a plain number.
        unsafe { (self.api.set_device)(self.device) };
        if call() != api::SUCCESS {
            // SAFETY: it takes nothing; the runtime would report the error again at an unrelated call.
            unsafe { (self.api.last_error)() };
        }
    }

    /// A call that fills in a handle.
    fn make(&self, name: &'static str, call: impl FnOnce(*mut Handle) -> Code) -> Result<NonNull<c_void>, Fault> {
        let mut handle = std::ptr::null_mut();
        self.call(name, || call(&raw mut handle))?;
        let null = || Fault { kind: FaultKind::Refused, call: name, text: "it returned a null handle".to_owned() };
        NonNull::new(handle).ok_or_else(null)
    }
}

impl Driver for Hip {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> Result<Memory, Fault> {
        self.call("hipSetDevice", || api::SUCCESS)?;
        memory(&self.api)
    }

    fn alloc(&self, n_bytes: usize) -> Result<u64, Fault> {
        // SAFETY: the handle's place is writable.
        let address = self.make("hipMalloc", |to| unsafe { (self.api.malloc)(to, n_bytes) })?;
        Ok(address.as_ptr().expose_provenance() as u64)
    }

    unsafe fn free(&self, address: u64) {
        // SAFETY: the caller gives an address of `alloc` that nothing uses.
        self.release(|| unsafe { (self.api.free)(pointer(address)) });
    }

    fn alloc_pinned(&self, n_bytes: usize) -> Result<NonNull<u8>, Fault> {
        // SAFETY: the handle's place is writable.
        Ok(self.make("hipHostMalloc", |to| unsafe { (self.api.host_malloc)(to, n_bytes, 0) })?.cast())
    }

    unsafe fn free_pinned(&self, host: NonNull<u8>) {
        // SAFETY: as for `free`.
        self.release(|| unsafe { (self.api.host_free)(host.as_ptr().cast()) });
    }

    unsafe fn copy_in(&self, to: u64, from: *const u8, n_bytes: usize) -> Result<(), Fault> {
        // SAFETY: the caller answers for both ranges until the copy is done.
        self.call("hipMemcpyAsync", || unsafe {
            (self.api.memcpy)(pointer(to), from.cast(), n_bytes, api::HOST_TO_DEVICE, self.stream)
        })
    }

    unsafe fn copy_out(&self, to: *mut u8, from: u64, n_bytes: usize) -> Result<(), Fault> {
        // SAFETY: the caller answers for both ranges until the copy is done.
        self.call("hipMemcpyAsync", || unsafe {
            (self.api.memcpy)(to.cast(), pointer(from), n_bytes, api::DEVICE_TO_HOST, self.stream)
        })
    }

    unsafe fn copy_within(&self, to: u64, from: u64, n_bytes: usize) -> Result<(), Fault> {
        // SAFETY: the caller answers for both ranges.
        self.call("hipMemcpyAsync", || unsafe {
            (self.api.memcpy)(pointer(to), pointer(from), n_bytes, api::DEVICE_TO_DEVICE, self.stream)
        })
    }

    unsafe fn fill(&self, to: u64, n_bytes: usize, byte: u8) -> Result<(), Fault> {
        // SAFETY: the caller answers for the range.
        self.call("hipMemsetAsync", || unsafe {
            (self.api.memset)(pointer(to), c_int::from(byte), n_bytes, self.stream)
        })
    }

    fn function(&self, name: &str) -> Result<FunctionInfo, Fault> {
        let call = "hipModuleGetFunction";
        let missing = || Fault { kind: FaultKind::NotFound, call, text: "a name with a zero byte".to_owned() };
        let name = CString::new(name).map_err(|_| missing())?;
        // SAFETY: the handle's place is writable, the name ends with a zero byte, the module is loaded.
        let function = self.make(call, |to| unsafe { (self.api.module_function)(to, self.module, name.as_ptr()) })?;
        Ok(FunctionInfo { function: Function(function), args_bytes: None })
    }

    unsafe fn launch(&self, function: Function, shape: LaunchShape, args: LaunchArgs) -> Result<(), Fault> {
        let mut n_bytes = args.n_bytes;
        // The form that carries the argument's size, so that the runtime can refuse another.
        let mut extra = [
            api::LAUNCH_POINTER,
            args.address.cast_mut(),
            api::LAUNCH_BYTES,
            (&raw mut n_bytes).cast(),
            api::LAUNCH_END,
        ];
        let [x, y, z] = shape.grid;
        // SAFETY: the runtime only reads as many bytes of the argument as it is told, before it returns.
        self.call("hipModuleLaunchKernel", || unsafe {
            (self.api.launch)(
                function.0.as_ptr(),
                x,
                y,
                z,
                shape.n_threads,
                1,
                1,
                0,
                self.stream,
                std::ptr::null_mut(),
                extra.as_mut_ptr(),
            )
        })
    }

    fn synchronize(&self) -> Result<(), Fault> {
        // SAFETY: the stream lives as long as `self`.
        self.call("hipStreamSynchronize", || unsafe { (self.api.stream_synchronize)(self.stream) })
    }

    fn event(&self) -> Result<RawEvent, Fault> {
        // SAFETY: the handle's place is writable.
        self.make("hipEventCreateWithFlags", |to| unsafe { (self.api.event_create)(to, 0) }).map(RawEvent)
    }

    fn record(&self, event: RawEvent) -> Result<(), Fault> {
        // SAFETY: event and stream are live handles of this device.
        self.call("hipEventRecord", || unsafe { (self.api.event_record)(event.0.as_ptr(), self.stream) })
    }

    fn wait(&self, event: RawEvent) -> Result<(), Fault> {
        // SAFETY: the event is a live handle of this device.
        self.call("hipEventSynchronize", || unsafe { (self.api.event_synchronize)(event.0.as_ptr()) })
    }

    fn elapsed_ms(&self, from: RawEvent, to: RawEvent) -> Result<f32, Fault> {
        let mut ms = 0.0;
        // SAFETY: both events are live handles of this device, and the result's place is writable.
        self.call("hipEventElapsedTime", || unsafe {
            (self.api.event_elapsed)(&raw mut ms, from.0.as_ptr(), to.0.as_ptr())
        })?;
        Ok(ms)
    }

    unsafe fn destroy_event(&self, event: RawEvent) {
        // SAFETY: the caller gives a live event for the last time.
        self.release(|| unsafe { (self.api.event_destroy)(event.0.as_ptr()) });
    }

    fn begin_capture(&self) -> Result<(), Fault> {
        // SAFETY: the stream lives as long as `self`.
        self.call("hipStreamBeginCapture", || unsafe {
            (self.api.begin_capture)(self.stream, api::CAPTURE_THREAD_LOCAL)
        })
    }

    fn end_capture(&self) -> Result<RawGraph, Fault> {
        // SAFETY: the handle's place is writable, and the stream lives as long as `self`.
        let graph = self.make("hipStreamEndCapture", |to| unsafe { (self.api.end_capture)(self.stream, to) })?;
        let nothing = std::ptr::null_mut();
        // SAFETY: the graph was just made; no log is asked for.
        let exec = self.make("hipGraphInstantiate", |to| unsafe {
            (self.api.graph_instantiate)(to, graph.as_ptr(), nothing, nothing.cast(), 0)
        });
        // SAFETY: the graph was made above, and what was made of it does not need it.
        self.release(|| unsafe { (self.api.graph_destroy)(graph.as_ptr()) });
        exec.map(RawGraph)
    }

    fn cancel_capture(&self) {
        // SAFETY: the handle's place is writable, and the stream lives as long as `self`.
        let graph = self.make("hipStreamEndCapture", |to| unsafe { (self.api.end_capture)(self.stream, to) });
        if let Ok(graph) = graph {
            // SAFETY: the graph was made above.
            self.release(|| unsafe { (self.api.graph_destroy)(graph.as_ptr()) });
        }
    }

    unsafe fn launch_graph(&self, graph: RawGraph) -> Result<(), Fault> {
        // SAFETY: the caller gives a live graph of this device.
        self.call("hipGraphLaunch", || unsafe { (self.api.graph_launch)(graph.0.as_ptr(), self.stream) })
    }

    unsafe fn destroy_graph(&self, graph: RawGraph) {
        // SAFETY: the caller gives a live graph for the last time.
        self.release(|| unsafe { (self.api.graph_exec_destroy)(graph.0.as_ptr()) });
    }
}

impl Drop for Hip {
    fn drop(&mut self) {
        // SAFETY: module and stream are this device's own and nothing uses them: buffers, events and graphs are gone.
        self.release(|| unsafe { (self.api.module_unload)(self.module) });
        // SAFETY: as above.
        self.release(|| unsafe { (self.api.stream_destroy)(self.stream) });
    }
}

/// A device address as the pointer that HIP takes.
fn pointer(address: u64) -> Handle {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_codes_mean_a_lost_device() {
        assert_eq!(kind_of(2), FaultKind::OutOfMemory);
        assert_eq!(kind_of(500), FaultKind::NotFound);
        assert_eq!(kind_of(1), FaultKind::Refused);
        assert_eq!(kind_of(901), FaultKind::Refused);
        for code in [3, 46, 100, 214, 700, 702, 710, 719, 999, 1053, 123_456] {
            assert_eq!(kind_of(code), FaultKind::Lost, "{code}");
        }
    }
}
