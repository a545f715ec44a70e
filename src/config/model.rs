//! Which folder a model's name means; the demo model is found beside the binary or in the source tree.

use std::path::{Path, PathBuf};

use super::ConfigError;

/// The name of the model that comes with flashd.
pub const DEMO: &str = "demo";

/// The folder of the demo model, wherever it is found.
const DEMO_DIR: &str = "demo-model";

/// The checkpoint's folder.
///
/// # Errors
/// When there is no such folder, saying where it was looked for.
pub fn find(name: &str) -> Result<PathBuf, ConfigError> {
    if name == DEMO {
        let binary = std::env::current_exe().ok();
        return find_demo(&demo_candidates(binary.as_deref()));
    }
    let path = PathBuf::from(name);
    if path.is_dir() {
        return Ok(path);
    }
    let reason = match path.metadata() {
        Ok(_) => "is a file; the model is the folder that holds config.json",
        Err(_) => "no such folder; models are not downloaded, give the folder that holds config.json, or `demo`",
    };
    Err(ConfigError::Unsupported { flag: "model", value: name.to_owned(), reason: reason.to_owned() })
}

/// Beside the binary, where packages put shared files, in the folders above it (a build in a source tree), and in the
/// source tree it was built from.
fn demo_candidates(binary: Option<&Path>) -> Vec<PathBuf> {
    let mut candidates = Vec::new();
    if let Some(folder) = binary.and_then(Path::parent) {
        candidates.push(folder.join(DEMO_DIR));
        if let Some(prefix) = folder.parent() {
            candidates.push(prefix.join("share/flashd").join(DEMO_DIR));
        }
        candidates.extend(folder.ancestors().skip(1).take(3).map(|above| above.join(DEMO_DIR)));
    }
    candidates.push(Path::new(env!("CARGO_MANIFEST_DIR")).join(DEMO_DIR));
    candidates
}

fn find_demo(candidates: &[PathBuf]) -> Result<PathBuf, ConfigError> {
    candidates.iter().find(|folder| folder.join("config.json").is_file()).cloned().ok_or_else(|| {
        ConfigError::DemoNotFound { looked: candidates.iter().map(|p| p.display().to_string()).collect() }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_model_is_found_at_each_of_its_places() {
        for place in ["bin/demo-model", "share/flashd/demo-model", "demo-model"] {
            let root = tempfile::tempdir().unwrap();
            let folder = root.path().join(place);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::create_dir_all(root.path().join("bin")).unwrap();
            std::fs::write(folder.join("config.json"), "{}").unwrap();
            let candidates = demo_candidates(Some(&root.path().join("bin/flashd")));
            assert_eq!(find_demo(&candidates).unwrap(), folder);
        }
    }

    #[test]
    fn a_build_in_the_source_tree_finds_it_above_the_target_folder() {
        let candidates = demo_candidates(Some(Path::new("/src/flashd/target/release/flashd")));
        assert!(candidates.contains(&PathBuf::from("/src/flashd/demo-model")));
    }

    #[test]
    fn what_is_missing_is_named_with_the_places() {
        let text =
            find_demo(&[PathBuf::from("/a/demo-model"), PathBuf::from("/b/demo-model")]).unwrap_err().to_string();
        assert!(text.contains("/a/demo-model") && text.contains("/b/demo-model"), "{text}");
        let text = find("/no/such/model").unwrap_err().to_string();
        assert!(text.starts_with("--model /no/such/model") && text.contains("no such folder"), "{text}");
    }

    #[test]
    fn a_file_is_not_a_model() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(find(file.path().to_str().unwrap()).unwrap_err().to_string().contains("is a file"));
    }
}
