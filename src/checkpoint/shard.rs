//! One safetensors file: its header is parsed and its length checked before anything is mapped.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use safetensors::tensor::Metadata;

use super::CheckpointError;
use crate::mmap;

/// Longest header that is read; the official ones stay below 200 KB.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// A file cut into more pieces than this is taken as wholly stored.
const MAX_EXTENTS: usize = 4096;

/// A shard whose header is sound and whose length is what the header says.
pub(super) struct CheckedShard {
    pub file_name: String,
    pub path: PathBuf,
    pub file_bytes: u64,
    /// Length field and JSON, as in the file.
    pub header: Vec<u8>,
    pub metadata: Metadata,
    file: File,
    /// Parts of the file that hold data; the rest are holes and read as zeros.
    extents: Vec<(u64, u64)>, // [start, end)
}

impl CheckedShard {
    /// Opens the file (through links), parses the header and compares the length.
    pub fn open(dir: &Path, file_name: &str) -> Result<Self, CheckpointError> {
        let path = dir.join(file_name);
        let io_error = |source| CheckpointError::Io { path: path.clone(), source };
        let mut file = File::open(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => CheckpointError::MissingShard { path: path.clone() },
            _ => io_error(error),
        })?;
        let file_bytes = file.metadata().map_err(io_error)?.len();
        let header = read_header(&mut file, &path, file_bytes)?;
        let metadata: Metadata = serde_json::from_slice(&header[8..])
            .map_err(|error| CheckpointError::Header { path: path.clone(), reason: error.to_string() })?;
        check_length(&path, (header.len() as u64).saturating_add(metadata.data_len() as u64), file_bytes)?;
        let extents = data_extents(&file, file_bytes);
        Ok(Self { file_name: file_name.to_owned(), path, file_bytes, header, metadata, file, extents })
    }

    /// Maps the whole file.
    pub fn map(&self) -> Result<Bytes, CheckpointError> {
        mmap::map_read_only(&self.file, self.file_bytes)
            .map_err(|source| CheckpointError::Io { path: self.path.clone(), source })
    }

    /// Whether no byte of this part of the file is stored: it reads as zeros without touching the disk.
    pub fn is_hole(&self, range: &Range<usize>) -> bool {
        let (start, end) = (range.start as u64, range.end as u64);
        start < end && !self.extents.iter().any(|&(from, to)| from < end && start < to)
    }
}

fn read_header(file: &mut File, path: &Path, file_bytes: u64) -> Result<Vec<u8>, CheckpointError> {
    let io_error = |source| CheckpointError::Io { path: path.to_owned(), source };
    check_room(path, 8, file_bytes)?;
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(io_error)?;
    let json_bytes = u64::from_le_bytes(length);
    if json_bytes > MAX_HEADER_BYTES {
        let reason = format!("{json_bytes} bytes of header; at most {MAX_HEADER_BYTES} are read");
        return Err(CheckpointError::Header { path: path.to_owned(), reason });
    }
    check_room(path, 8 + json_bytes, file_bytes)?;
    let mut header = vec![0; 8 + json_bytes as usize];
    header[..8].copy_from_slice(&length);
    file.read_exact(&mut header[8..]).map_err(io_error)?;
    Ok(header)
}

fn check_room(path: &Path, want: u64, got: u64) -> Result<(), CheckpointError> {
    if got < want { Err(truncated(path, want, got)) } else { Ok(()) }
}

fn check_length(path: &Path, want: u64, got: u64) -> Result<(), CheckpointError> {
    check_room(path, want, got)?;
    if got > want {
        let reason = format!("{} bytes after the last tensor", got - want);
        return Err(CheckpointError::Header { path: path.to_owned(), reason });
    }
    Ok(())
}

fn truncated(path: &Path, want: u64, got: u64) -> CheckpointError {
    CheckpointError::Truncated { path: path.to_owned(), want, got, missing: want - got }
}

/// Asks the file system for the parts that hold data. One that can't tell has no holes.
fn data_extents(file: &File, file_bytes: u64) -> Vec<(u64, u64)> {
    let whole = vec![(0, file_bytes)];
    let mut extents = Vec::new();
    let mut position = 0;
    while position < file_bytes {
        let start = match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(position)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break, // No data from here to the end.
            Err(_) => return whole,
        };
        let Ok(end) = rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(start)) else { return whole };
        if end <= start || extents.len() == MAX_EXTENTS {
            return whole;
        }
        extents.push((start, end));
        position = end;
    }
    extents
}
