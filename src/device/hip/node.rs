//! Why no AMD GPU is there: the device nodes, and who may open them.

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::path::Path;

/// What was found, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was found.
    pub reason: String,
    /// What to do.
    pub remedy: &'static str,
}

/// Looks at the nodes below `root` (`/` but for tests).
pub fn diagnose(root: &Path) -> Finding {
    let kfd = root.join("dev/kfd");
    let finding = |reason: String, remedy| Finding { reason, remedy };
    match OpenOptions::new().read(true).write(true).open(&kfd) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let remedy = "load the amdgpu driver; in a container pass --device /dev/kfd --device /dev/dri";
            return finding("there is no AMD GPU: /dev/kfd does not exist".to_owned(), remedy);
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            let remedy = "add the user to the groups render and video (docker: --group-add render --group-add video)";
            return finding("/dev/kfd may not be opened: permission denied".to_owned(), remedy);
        }
        Err(error) => {
            return finding(
                format!("/dev/kfd can't be opened: {error}"),
                "look at the amdgpu driver's messages (dmesg)",
            );
        }
    }
    let nodes = std::fs::read_dir(root.join("dev/dri")).map(|entries| {
        let names = entries.flatten().map(|entry| entry.path());
        names
            .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("renderD")))
            .collect()
    });
    let nodes: Vec<_> = nodes.unwrap_or_default();
    if nodes.is_empty() {
        let remedy = "in a container pass --device /dev/dri beside --device /dev/kfd";
        return finding("/dev/kfd is there, but no /dev/dri/renderD node".to_owned(), remedy);
    }
    if !nodes.iter().any(|path| OpenOptions::new().read(true).write(true).open(path).is_ok()) {
        let remedy = "add the user to the groups render and video (docker: --group-add render --group-add video)";
        return finding("no /dev/dri/renderD node may be opened".to_owned(), remedy);
    }
    let remedy = "look at HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, which may hide it, and at rocminfo";
    finding("the device nodes are there, but the runtime shows no GPU".to_owned(), remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(files: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for file in files {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        root
    }

    #[test]
    fn each_missing_node_has_its_remedy() {
        let cases: [(&[&str], &str, &str); 3] = [
            (&[], "/dev/kfd does not exist", "amdgpu"),
            (&["dev/kfd"], "no /dev/dri/renderD", "--device /dev/dri"),
            (&["dev/kfd", "dev/dri/renderD128"], "shows no GPU", "HIP_VISIBLE_DEVICES"),
        ];
        for (files, reason, remedy) in cases {
            let finding = diagnose(root(files).path());
            assert!(finding.reason.contains(reason), "{finding:?}");
            assert!(finding.remedy.contains(remedy), "{finding:?}");
        }
    }

    #[test]
    fn a_node_that_is_no_file_is_told_as_it_is() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("dev/kfd")).unwrap();
        assert!(diagnose(root.path()).reason.contains("can't be opened"));
    }
}
