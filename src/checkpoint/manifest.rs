//! SHA-256 sums of a checkpoint's files, in the format of sha256sum: written, and checked file by file.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::{CONFIG_FILE, INDEX_FILE};

/// Files that belong to a checkpoint beside its shards, where they exist.
const SMALL_FILES: [&str; 5] =
    [CONFIG_FILE, INDEX_FILE, "tokenizer.json", "tokenizer_config.json", "generation_config.json"];
const BUFFER_BYTES: usize = 1 << 20;

/// One line of a list of sums.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sum {
    /// Name in the checkpoint's directory.
    pub file_name: String,
    /// SHA-256, lower-case hex.
    pub sha256: String,
}

/// What became of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    /// Name in the checkpoint's directory.
    pub file_name: String,
    /// How it compares.
    pub verdict: Verdict,
}

/// How a file compares with its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// As listed.
    Ok,
    /// Another content.
    Differs {
        /// What it is instead.
        got: String,
    },
    /// Can't be read (or isn't there).
    Unreadable {
        /// What the system said.
        reason: String,
    },
    /// A shard that the list doesn't name.
    Unlisted,
}

/// Why sums couldn't be made or read.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The system refused an operation.
    #[error("{}: {source}", path.display())]
    Io {
        /// On which file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// Not a line of sha256sum.
    #[error("line {line_number}: want 64 hex digits, two spaces and a file name, got {line:?}")]
    BadLine {
        /// Counted from 1.
        line_number: usize,
        /// The line.
        line: String,
    },
    /// A list that checks nothing.
    #[error("the list of sums is empty")]
    Empty,
}

impl Sum {
    /// The line of sha256sum.
    #[must_use]
    pub fn line(&self) -> String {
        format!("{}  {}", self.sha256, self.file_name)
    }
}

/// The files whose sums make up a checkpoint, in order: config, index, tokenizer, then the shards.
///
/// # Errors
/// The directory can't be read.
pub fn files(dir: &Path) -> Result<Vec<String>, ManifestError> {
    let small = SMALL_FILES.iter().filter(|name| dir.join(name).is_file()).map(|&name| name.to_owned());
    Ok(small.chain(shard_files(dir)?).collect())
}

/// Bytes of these files; links count as what they lead to, and what can't be read as nothing.
#[must_use]
pub fn total_bytes<'a>(dir: &Path, file_names: impl IntoIterator<Item = &'a str>) -> u64 {
    file_names.into_iter().filter_map(|name| dir.join(name).metadata().ok()).map(|data| data.len()).sum()
}

/// Hashes files in parallel; `progress` is told of bytes as they are done.
///
/// # Errors
/// A file can't be read.
pub fn sums(dir: &Path, file_names: &[String], progress: &(dyn Fn(u64) + Sync)) -> Result<Vec<Sum>, ManifestError> {
    let one = |file_name: &String| {
        let path = dir.join(file_name);
        let sha256 = hash(&path, progress).map_err(|source| ManifestError::Io { path, source })?;
        Ok(Sum { file_name: file_name.clone(), sha256 })
    };
    file_names.par_iter().map(one).collect()
}

/// Reads the lines of sha256sum, text or binary form. Names that lead out of the directory are refused.
///
/// # Errors
/// A line of another form; no line at all.
pub fn parse(text: &str) -> Result<Vec<Sum>, ManifestError> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let sums = lines
        .map(|(line_idx, line)| {
            parse_line(line).ok_or_else(|| ManifestError::BadLine { line_number: line_idx + 1, line: line.to_owned() })
        })
        .collect::<Result<Vec<_>, _>>()?;
    if sums.is_empty() { Err(ManifestError::Empty) } else { Ok(sums) }
}

/// Compares every listed file, in parallel; then names the shards that the list leaves out.
///
/// # Errors
/// The directory can't be read; a file that can't is a verdict.
pub fn verify(dir: &Path, sums: &[Sum], progress: &(dyn Fn(u64) + Sync)) -> Result<Vec<Checked>, ManifestError> {
    let one = |sum: &Sum| {
        let verdict = match hash(&dir.join(&sum.file_name), progress) {
            Ok(got) if got == sum.sha256 => Verdict::Ok,
            Ok(got) => Verdict::Differs { got },
            Err(error) => Verdict::Unreadable { reason: error.to_string() },
        };
        Checked { file_name: sum.file_name.clone(), verdict }
    };
    let mut checked: Vec<Checked> = sums.par_iter().map(one).collect();
    let listed: HashSet<&str> = sums.iter().map(|sum| sum.file_name.as_str()).collect();
    let unlisted = shard_files(dir)?.into_iter().filter(|name| !listed.contains(name.as_str()));
    checked.extend(unlisted.map(|file_name| Checked { file_name, verdict: Verdict::Unlisted }));
    Ok(checked)
}

fn shard_files(dir: &Path) -> Result<Vec<String>, ManifestError> {
    let io_error = |source| ManifestError::Io { path: dir.to_owned(), source };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(io_error)? {
        let name = entry.map_err(io_error)?.file_name();
        names.extend(name.to_str().filter(|name| name.ends_with(".safetensors")).map(str::to_owned));
    }
    names.sort_unstable();
    Ok(names)
}

fn parse_line(line: &str) -> Option<Sum> {
    let (sha256, name) = line.split_at_checked(64)?;
    let file_name = name.strip_prefix("  ").or_else(|| name.strip_prefix(" *"))?.trim_end();
    let is_plain = Path::new(file_name).file_name().is_some_and(|last| last == file_name);
    let is_hex = sha256.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_plain && is_hex).then(|| Sum { file_name: file_name.to_owned(), sha256: sha256.to_ascii_lowercase() })
}

fn hash(path: &Path, progress: &(dyn Fn(u64) + Sync)) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut hash = Sha256::new();
    loop {
        let n_bytes = file.read(&mut buffer)?;
        if n_bytes == 0 {
            return Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect());
        }
        hash.update(&buffer[..n_bytes]);
        progress(n_bytes as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn checkpoint() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in ["config.json", "2.safetensors", "1.safetensors", "README.md"] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        dir
    }

    fn lines(dir: &Path) -> String {
        let sums = sums(dir, &files(dir).unwrap(), &|_| ()).unwrap();
        sums.iter().map(|sum| sum.line() + "\n").collect()
    }

    #[test]
    fn sums_of_the_files_that_matter() {
        let dir = checkpoint();
        assert_eq!(files(dir.path()).unwrap(), ["config.json", "1.safetensors", "2.safetensors"]);
        fs::write(dir.path().join("1.safetensors"), "abc").unwrap();
        let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  1.safetensors";
        assert_eq!(lines(dir.path()).lines().nth(1), Some(known));
        assert_eq!(total_bytes(dir.path(), ["1.safetensors", "gone"]), 3);
    }

    #[test]
    fn every_bad_file_is_named() {
        let dir = checkpoint();
        let sums = parse(&lines(dir.path())).unwrap();
        let verdicts =
            |dir: &Path| verify(dir, &sums, &|_| ()).unwrap().into_iter().map(|c| c.verdict).collect::<Vec<_>>();
        assert_eq!(verdicts(dir.path()), vec![Verdict::Ok; 3]);
        fs::write(dir.path().join("1.safetensors"), "x").unwrap();
        fs::remove_file(dir.path().join("2.safetensors")).unwrap();
        fs::write(dir.path().join("3.safetensors"), "x").unwrap();
        let got = verdicts(dir.path());
        assert!(
            matches!(&got[..], [Verdict::Ok, Verdict::Differs { .. }, Verdict::Unreadable { .. }, Verdict::Unlisted]),
            "{got:?}"
        );
    }

    #[test]
    fn lines_of_sha256sum() {
        let digits = "AB".repeat(32);
        let sums = parse(&format!("{digits}  a b\n\n{digits} *c\n")).unwrap();
        assert_eq!(sums[0], Sum { file_name: "a b".to_owned(), sha256: "ab".repeat(32) });
        assert_eq!(sums[1].file_name, "c");
        for bad in ["", "abc  x", &format!("{digits} x"), &format!("{digits}  ../x"), &"é".repeat(40)] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
