//! Checkpoint files: sharded safetensors read through maps, manifests of hashes, synthetic weights by formula.

mod formula;
pub mod manifest;
mod shard;
pub mod spec;
pub mod synth;
mod synth_files;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as MapEntry;
use std::ops::Range;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde::Deserialize;
use sha2::{Digest, Sha256};

use self::shard::CheckedShard;
use self::spec::Dtype;

/// The file that maps tensors to shards.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// The only shard of a checkpoint without an index.
pub const SINGLE_FILE: &str = "model.safetensors";
/// The model's shape.
pub const CONFIG_FILE: &str = "config.json";

/// An open checkpoint: every shard checked and mapped read-only. Views keep their map alive.
pub struct Checkpoint {
    dir: PathBuf,
    config: Vec<u8>,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Entry>,
    model_id: ModelId,
}

/// A mapped shard.
pub struct Shard {
    /// Name in the checkpoint's directory.
    pub file_name: String,
    /// Bytes of the file.
    pub file_bytes: u64,
    map: Bytes,
}

/// A tensor's form and bytes.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    /// Stored element type.
    pub dtype: Dtype,
    /// Stored shape, row-major.
    pub shape: &'a [usize],
    /// The elements, little-endian, not necessarily aligned.
    pub bytes: Bytes,
    /// The file has a hole here: every byte is zero and none needs to be read to know it.
    pub is_hole: bool,
}

/// SHA-256 over config.json and every shard's name, length and header (never its data): tells checkpoints apart cheaply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ModelId(pub [u8; 32]);

/// Why a checkpoint was refused.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The system refused an operation on a file.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Nothing to open.
    #[error("{}: neither {INDEX_FILE} nor {SINGLE_FILE} is there", dir.display())]
    NoWeights {
        /// Where.
        dir: PathBuf,
    },
    /// The index can't be read.
    #[error("{}: {reason}", path.display())]
    Index {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A file that the index names isn't there.
    #[error("{}: the index names this shard, but it isn't there", path.display())]
    MissingShard {
        /// Which file.
        path: PathBuf,
    },
    /// A shard ends too early.
    #[error("{}: {missing} bytes are missing: the header needs {want}, the file has {got}", path.display())]
    Truncated {
        /// Which file.
        path: PathBuf,
        /// Bytes the header needs.
        want: u64,
        /// Bytes of the file.
        got: u64,
        /// The difference.
        missing: u64,
    },
    /// A shard's header is broken: not JSON, offsets that overlap, leave gaps or don't fit the shapes.
    #[error("{}: bad safetensors header: {reason}", path.display())]
    Header {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The index names a tensor that its shard doesn't hold.
    #[error("{}: the index says that {tensor} is here, but it isn't", path.display())]
    TensorMissing {
        /// Which shard.
        path: PathBuf,
        /// Which tensor.
        tensor: String,
    },
    /// A shard holds a tensor that the index doesn't name.
    #[error("{}: {tensor} is here, but not in the index", path.display())]
    TensorUnlisted {
        /// Which shard.
        path: PathBuf,
        /// Which tensor.
        tensor: String,
    },
    /// Two shards hold the same tensor.
    #[error("{tensor} is in two shards, {first} and {second}")]
    TensorTwice {
        /// Which tensor.
        tensor: String,
        /// One shard.
        first: String,
        /// The other.
        second: String,
    },
}

struct Entry {
    shard_idx: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// In the shard's map.
    range: Range<usize>,
    is_hole: bool,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens the checkpoint in `dir`: every header is parsed and every length compared before the first map is made.
    ///
    /// # Errors
    /// [`CheckpointError`] names the file, and the tensor where there is one.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let config = read(&dir.join(CONFIG_FILE))?;
        let index = read_index(dir)?;
        let checked = open_shards(dir, index.as_ref())?;
        let tensors = collect_tensors(&checked)?;
        if let Some(index) = &index {
            check_index(index, &checked, &tensors)?;
        }
        let model_id = model_id(&config, &checked);
        let shards = checked
            .into_iter()
            .map(|shard| Ok(Shard { map: shard.map()?, file_bytes: shard.file_bytes, file_name: shard.file_name }))
            .collect::<Result<_, CheckpointError>>()?;
        Ok(Self { dir: dir.to_owned(), config, shards, tensors, model_id })
    }

    /// Where it is.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The bytes of config.json.
    #[must_use]
    pub fn config_json(&self) -> &[u8] {
        &self.config
    }

    /// The shards, by file name.
    #[must_use]
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Tells checkpoints apart.
    #[must_use]
    pub fn model_id(&self) -> ModelId {
        self.model_id
    }

    /// A tensor by name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.tensors.get(name).map(|entry| self.view(entry))
    }

    /// Every tensor, by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, TensorView<'_>)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), self.view(entry)))
    }

    /// Number of tensors.
    #[must_use]
    pub fn n_tensors(&self) -> usize {
        self.tensors.len()
    }

    /// Bytes of all tensors, without headers.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.values().map(|entry| entry.range.len() as u64).sum()
    }

    fn view<'a>(&'a self, entry: &'a Entry) -> TensorView<'a> {
        TensorView {
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: self.shards[entry.shard_idx].map.slice(entry.range.clone()),
            is_hole: entry.is_hole,
        }
    }
}

impl std::fmt::Display for ModelId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

fn read(path: &Path) -> Result<Vec<u8>, CheckpointError> {
    std::fs::read(path).map_err(|source| CheckpointError::Io { path: path.to_owned(), source })
}

/// The index, or None for a checkpoint of one file.
fn read_index(dir: &Path) -> Result<Option<Index>, CheckpointError> {
    let path = dir.join(INDEX_FILE);
    if !path.exists() {
        let is_single = dir.join(SINGLE_FILE).exists();
        return if is_single { Ok(None) } else { Err(CheckpointError::NoWeights { dir: dir.to_owned() }) };
    }
    let index: Index = serde_json::from_slice(&read(&path)?)
        .map_err(|error| CheckpointError::Index { path: path.clone(), reason: error.to_string() })?;
    // A shard is a file of this directory (or a link in it), never a path that leads elsewhere.
    let is_plain = |name: &str| Path::new(name).file_name().is_some_and(|last| last == name);
    if let Some(name) = index.weight_map.values().find(|name| !is_plain(name)) {
        return Err(CheckpointError::Index { path, reason: format!("{name:?} is not a file name") });
    }
    Ok(Some(index))
}

fn open_shards(dir: &Path, index: Option<&Index>) -> Result<Vec<CheckedShard>, CheckpointError> {
    let Some(index) = index else {
        return Ok(vec![CheckedShard::open(dir, SINGLE_FILE)?]);
    };
    let mut file_names: Vec<&String> = index.weight_map.values().collect();
    file_names.sort_unstable();
    file_names.dedup();
    file_names.into_iter().map(|file_name| CheckedShard::open(dir, file_name)).collect()
}

fn collect_tensors(shards: &[CheckedShard]) -> Result<BTreeMap<String, Entry>, CheckpointError> {
    let mut tensors: BTreeMap<String, Entry> = BTreeMap::new();
    for (shard_idx, shard) in shards.iter().enumerate() {
        for (name, info) in shard.metadata.tensors() {
            let (start, end) = info.data_offsets;
            let range = shard.header.len() + start..shard.header.len() + end;
            let is_hole = shard.is_hole(&range);
            let entry = Entry { shard_idx, dtype: info.dtype, shape: info.shape.clone(), range, is_hole };
            match tensors.entry(name) {
                MapEntry::Vacant(place) => place.insert(entry),
                MapEntry::Occupied(other) => {
                    return Err(CheckpointError::TensorTwice {
                        tensor: other.key().clone(),
                        first: shards[other.get().shard_idx].file_name.clone(),
                        second: shard.file_name.clone(),
                    });
                }
            };
        }
    }
    Ok(tensors)
}

/// Index and headers must name the same tensors in the same shards.
fn check_index(
    index: &Index,
    shards: &[CheckedShard],
    tensors: &BTreeMap<String, Entry>,
) -> Result<(), CheckpointError> {
    for (name, file_name) in &index.weight_map {
        let is_there = tensors.get(name).is_some_and(|entry| shards[entry.shard_idx].file_name == *file_name);
        if !is_there {
            let path = shards.iter().find(|shard| shard.file_name == *file_name).map(|shard| shard.path.clone());
            return Err(CheckpointError::TensorMissing { path: path.unwrap_or_default(), tensor: name.clone() });
        }
    }
    match tensors.iter().find(|(name, _)| !index.weight_map.contains_key(*name)) {
        Some((name, entry)) => {
            Err(CheckpointError::TensorUnlisted { path: shards[entry.shard_idx].path.clone(), tensor: name.clone() })
        }
        None => Ok(()),
    }
}

fn model_id(config: &[u8], shards: &[CheckedShard]) -> ModelId {
    let mut hash = Sha256::new();
    hash.update((config.len() as u64).to_le_bytes());
    hash.update(config);
    for shard in shards {
        hash.update((shard.file_name.len() as u64).to_le_bytes());
        hash.update(&shard.file_name);
        hash.update(shard.file_bytes.to_le_bytes());
        hash.update(&shard.header);
    }
    ModelId(hash.finalize().into())
}
#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::fs;

    /// Writes one shard: (name, shape) of F32 tensors filled with a byte each.
    fn write_shard(path: &Path, tensors: &[(&str, usize)]) {
        let mut header = serde_json::Map::new();
        let mut data = Vec::new();
        for (i, &(name, n)) in tensors.iter().enumerate() {
            let start = data.len();
            data.resize(start + 4 * n, i as u8 + 1);
            header.insert(name.to_owned(), json!({"dtype": "F32", "shape": [n], "data_offsets": [start, data.len()]}));
        }
        write_raw(path, &Value::Object(header), &data);
    }

    fn write_raw(path: &Path, header: &Value, data: &[u8]) {
        let json = header.to_string();
        let parts = [&(json.len() as u64).to_le_bytes(), json.as_bytes(), data];
        fs::write(path, parts.concat()).unwrap();
    }

    fn write_index(dir: &Path, map: &[(&str, &str)]) {
        let map: BTreeMap<_, _> = map.iter().copied().collect();
        fs::write(dir.join(INDEX_FILE), json!({"weight_map": map}).to_string()).unwrap();
    }

    /// Two shards: a, b in 1.safetensors and c in 2.safetensors.
    fn two_shards() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(CONFIG_FILE), "{}").unwrap();
        write_shard(&dir.path().join("1.safetensors"), &[("a", 3), ("b", 5)]);
        write_shard(&dir.path().join("2.safetensors"), &[("c", 2000)]);
        write_index(dir.path(), &[("a", "1.safetensors"), ("b", "1.safetensors"), ("c", "2.safetensors")]);
        dir
    }

    fn refusal(dir: &Path) -> String {
        match Checkpoint::open(dir) {
            Ok(_) => panic!("opened"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn opens_shards_and_gives_views_that_outlive_it() {
        let dir = two_shards();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.tensors().map(|(name, _)| name).collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(checkpoint.tensor_bytes(), 8032);
        assert!(checkpoint.tensor("d").is_none());
        let view = checkpoint.tensor("b").unwrap();
        assert_eq!((view.dtype, view.shape), (Dtype::F32, &[5][..]));
        let bytes = view.bytes.clone();
        drop(checkpoint);
        assert_eq!(&bytes[..], [2; 20]);
    }

    #[test]
    fn opens_a_single_file_without_an_index() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(CONFIG_FILE), "{}").unwrap();
        assert!(refusal(dir.path()).contains("neither"));
        write_shard(&dir.path().join(SINGLE_FILE), &[("a", 3)]);
        assert_eq!(Checkpoint::open(dir.path()).unwrap().n_tensors(), 1);
    }

    #[test]
    fn a_cut_shard_is_refused_with_the_missing_bytes() {
        let dir = two_shards();
        let path = dir.path().join("2.safetensors");
        let n_bytes = fs::metadata(&path).unwrap().len();
        // In the data, in the header, and in the length field.
        for cut in [1, 8000, n_bytes - 20, n_bytes - 3] {
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(n_bytes - cut).unwrap();
            let error = refusal(dir.path());
            assert!(error.contains("2.safetensors") && error.contains("bytes are missing"), "{error}");
            if cut <= 8000 {
                assert!(error.contains(&format!("{cut} bytes are missing")), "{error}");
            }
            write_shard(&path, &[("c", 2000)]);
        }
    }

    #[test]
    fn a_missing_shard_is_named() {
        let dir = two_shards();
        fs::remove_file(dir.path().join("1.safetensors")).unwrap();
        let error = refusal(dir.path());
        assert!(error.contains("1.safetensors") && error.contains("isn't there"), "{error}");
    }

    #[test]
    fn index_and_headers_must_agree() {
        let dir = two_shards();
        let all = [("a", "1.safetensors"), ("b", "1.safetensors"), ("c", "2.safetensors")];
        write_index(dir.path(), &[&all[..], &[("d", "2.safetensors")]].concat());
        let error = refusal(dir.path());
        assert!(error.contains("2.safetensors: the index says that d is here"), "{error}");
        write_index(dir.path(), &[all[0], ("b", "2.safetensors"), all[2]]);
        let error = refusal(dir.path());
        assert!(error.contains("2.safetensors: the index says that b is here"), "{error}");
        write_index(dir.path(), &[all[0], all[2]]);
        let error = refusal(dir.path());
        assert!(error.contains("1.safetensors: b is here, but not in the index"), "{error}");
        write_index(dir.path(), &all);
        write_shard(&dir.path().join("2.safetensors"), &[("c", 1), ("a", 1)]);
        let error = refusal(dir.path());
        assert!(error.contains("a is in two shards, 1.safetensors and 2.safetensors"), "{error}");
        write_index(dir.path(), &[("a", "../1.safetensors")]);
        assert!(refusal(dir.path()).contains("is not a file name"));
        fs::write(dir.path().join(INDEX_FILE), "{\"weight_map\": 3}").unwrap();
        assert!(refusal(dir.path()).contains(INDEX_FILE));
    }

    #[test]
    fn bad_headers_are_refused() {
        let dir = two_shards();
        let path = dir.path().join("2.safetensors");
        let tensor =
            |n: usize, start: usize, end: usize| json!({"dtype": "F32", "shape": [n], "data_offsets": [start, end]});
        let cases = [
            ("overlap", json!({"c": tensor(2, 0, 8), "d": tensor(2, 4, 12)}), 12),
            ("gap", json!({"c": tensor(2, 0, 8), "d": tensor(2, 12, 20)}), 20),
            ("backwards", json!({"c": tensor(2, 8, 0)}), 8),
            ("size and shape differ", json!({"c": tensor(3, 0, 8)}), 8),
            ("overflow", json!({"c": {"dtype": "F32", "shape": [1u64 << 62, 8], "data_offsets": [0, 8]}}), 8),
            ("unknown type", json!({"c": {"dtype": "F3", "shape": [2], "data_offsets": [0, 8]}}), 8),
            ("trailing bytes", json!({"c": tensor(2, 0, 8)}), 9),
        ];
        for (what, header, n_bytes) in cases {
            write_raw(&path, &header, &vec![0; n_bytes]);
            let error = refusal(dir.path());
            assert!(error.contains("2.safetensors: bad safetensors header"), "{what}: {error}");
        }
        fs::write(&path, [&u64::MAX.to_le_bytes()[..], b"{}"].concat()).unwrap();
        assert!(refusal(dir.path()).contains("bytes of header"));
        // Offsets past the end of the file are a truncation.
        write_raw(&path, &json!({"c": tensor(2, 0, 8)}), &[0; 4]);
        assert!(refusal(dir.path()).contains("4 bytes are missing"));
    }

    #[test]
    fn linked_shards_are_accepted_and_their_targets_measured() {
        let (dir, blobs) = (two_shards(), tempfile::tempdir().unwrap());
        let (link, blob) = (dir.path().join("2.safetensors"), blobs.path().join("blob"));
        fs::rename(&link, &blob).unwrap();
        std::os::unix::fs::symlink(&blob, &link).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.tensor("c").unwrap().bytes.len(), 8000);
        let n_bytes = fs::metadata(&blob).unwrap().len();
        fs::OpenOptions::new().write(true).open(&blob).unwrap().set_len(n_bytes - 7).unwrap();
        assert!(refusal(dir.path()).contains("7 bytes are missing"));
    }

    #[test]
    fn the_id_follows_headers_sizes_and_config_but_not_data() {
        let dir = two_shards();
        let id = |dir: &Path| Checkpoint::open(dir).unwrap().model_id();
        let first = id(dir.path());
        let mut bytes = fs::read(dir.path().join("1.safetensors")).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(dir.path().join("1.safetensors"), bytes).unwrap();
        assert_eq!(id(dir.path()), first);
        fs::write(dir.path().join(CONFIG_FILE), "{ }").unwrap();
        let second = id(dir.path());
        assert_ne!(second, first);
        write_shard(&dir.path().join("2.safetensors"), &[("c", 2001)]);
        assert_ne!(id(dir.path()), second);
        assert_eq!(first.to_string().len(), 64);
    }

    #[test]
    fn holes_are_known_and_stored_zeros_are_not_taken_for_holes() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(CONFIG_FILE), "{}").unwrap();
        let path = dir.path().join(SINGLE_FILE);
        let n = 1 << 18;
        let tensor = |i: usize| json!({"dtype": "F32", "shape": [n], "data_offsets": [4 * n * i, 4 * n * (i + 1)]});
        write_raw(&path, &json!({"a": tensor(0), "b": tensor(1)}), &vec![0; 4 * n]);
        let n_bytes = fs::metadata(&path).unwrap().len();
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(n_bytes + 4 * n as u64).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert!(!checkpoint.tensor("a").unwrap().is_hole);
        let b = checkpoint.tensor("b").unwrap();
        assert!(b.bytes.iter().all(|&byte| byte == 0));
        // The last block of a, and with it the first bytes of b, may be stored: a hole is only claimed where nothing is.
        assert!(!b.is_hole);
    }
}
