//! Where kernel binaries are: one code object an architecture holds all kernels.

use std::path::{Path, PathBuf};

use super::{DeviceError, DeviceKind};

/// Wave widths of the simulator's code objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SimWave {
    /// As sm_90.
    #[default]
    W32,
    /// As gfx942.
    W64,
}

impl SimWave {
    /// Lanes of a wave.
    #[must_use]
    pub const fn n_lanes(self) -> u32 {
        match self {
            Self::W32 => 32,
            Self::W64 => 64,
        }
    }

    /// Name of the architecture and of its folder.
    #[must_use]
    pub const fn arch(self) -> &'static str {
        match self {
            Self::W32 => "sim32",
            Self::W64 => "sim64",
        }
    }
}

/// Where to look for code objects and for the libraries of device runtimes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CodeObjects {
    /// Folders that may hold `<arch>/flashd.{co,cubin,so}`, the first to try first.
    pub folders: Vec<PathBuf>,
    /// Folders that may hold a runtime's library, before the system's own; ROCm's and CUDA's, LD_LIBRARY_PATH.
    pub library_folders: Vec<PathBuf>,
    /// Which code object the simulator runs.
    pub sim_wave: SimWave,
}

impl CodeObjects {
    /// Looks beside a binary: `kernels/` in its folder, in `share/flashd/` of its prefix, and, for a binary of a build, in
    /// the build's target folder; then in the source tree that it was built from.
    #[must_use]
    pub fn beside(binary: Option<&Path>) -> Self {
        let mut folders = Vec::new();
        if let Some(folder) = binary.and_then(Path::parent) {
            folders.push(folder.join("kernels"));
            if let Some(prefix) = folder.parent() {
                folders.push(prefix.join("share/flashd/kernels"));
                folders.push(prefix.join("kernels"));
                folders.extend(prefix.parent().map(|above| above.join("kernels")));
            }
        }
        folders.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("target/kernels"));
        Self { folders, ..Self::default() }
    }

    /// The same places with another wave width of the simulator.
    #[must_use]
    pub fn with_sim_wave(mut self, sim_wave: SimWave) -> Self {
        self.sim_wave = sim_wave;
        self
    }

    /// The stand-in for HIP's library that runs kernels on the host.
    ///
    /// # Errors
    /// [`DeviceError::CodeMissing`].
    pub fn sim_library(&self) -> Result<PathBuf, DeviceError> {
        self.find("sim", "sim", Path::new("sim/libamdhip64.so"))
    }

    /// The code object of an architecture.
    ///
    /// # Errors
    /// [`DeviceError::CodeMissing`].
    pub fn code_object(&self, kind: DeviceKind, arch: &str) -> Result<PathBuf, DeviceError> {
        let (target, file) = match kind {
            DeviceKind::Cuda => ("sm_90a", "flashd.cubin"),
            DeviceKind::Hip => ("gfx942", "flashd.co"),
            DeviceKind::Sim => ("sim", "flashd.so"),
        };
        self.find(arch, target, &Path::new(arch).join(file))
    }

    fn find(&self, arch: &str, target: &'static str, file: &Path) -> Result<PathBuf, DeviceError> {
        let missing = || DeviceError::CodeMissing {
            arch: arch.to_owned(),
            target,
            file: file.to_owned(),
            looked: self.folders.clone(),
        };
        self.folders.iter().map(|folder| folder.join(file)).find(|path| path.is_file()).ok_or_else(missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_objects_are_found_at_each_place() {
        for place in ["bin/kernels", "share/flashd/kernels", "kernels"] {
            let root = tempfile::tempdir().unwrap();
            let folder = root.path().join(place).join("sm_90a");
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("flashd.cubin"), "x").unwrap();
            let code = CodeObjects::beside(Some(&root.path().join("bin/flashd")));
            assert_eq!(code.code_object(DeviceKind::Cuda, "sm_90a").unwrap(), folder.join("flashd.cubin"));
        }
    }

    #[test]
    fn what_is_missing_is_named_with_the_command_that_makes_it() {
        let code = CodeObjects { folders: vec!["/a/kernels".into(), "/b/kernels".into()], ..CodeObjects::default() };
        let text = code.code_object(DeviceKind::Sim, SimWave::W64.arch()).unwrap_err().to_string();
        for part in
            ["sim64/flashd.so", "/a/kernels", "/b/kernels", "cargo xtask kernels --target sim", "FLASHD_KERNELS"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
