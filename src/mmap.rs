//! Safe read-only maps of files and of zeros: the length is checked before use and the map lives as long as any view of it.

use std::fs::File;
use std::io;

use bytes::Bytes;

/// Maps a file of exactly `len_bytes` bytes, read-only.
///
/// The file must not be cut short while the map lives: pages past its end raise SIGBUS, as with every file map. Writing to
/// it meanwhile changes the bytes seen.
///
/// # Errors
/// The file has another length, or the system refuses the map.
pub fn map_read_only(file: &File, len_bytes: u64) -> io::Result<Bytes> {
    let got = file.metadata()?.len();
    if got != len_bytes {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{got} bytes where {len_bytes} were expected")));
    }
    if len_bytes == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: the map is read-only and private, covers exactly the length just read from the open file, and is owned by the
    // returned `Bytes`, so no view outlives it; bytes are only ever read as plain integers, for which every value is valid.
    let map = unsafe { memmap2::MmapOptions::new().map_copy_read_only(file)? };
    if map.len() as u64 != len_bytes {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the file changed its length while it was mapped"));
    }
    Ok(Bytes::from_owner(map))
}

/// Zeros that take no memory: every page is the system's one page of zeros until it is written, and it never is.
///
/// # Errors
/// The system refuses the map.
pub fn map_zeros(n_bytes: usize) -> io::Result<Bytes> {
    if n_bytes == 0 {
        return Ok(Bytes::new());
    }
    Ok(Bytes::from_owner(memmap2::MmapMut::map_anon(n_bytes)?.make_read_only()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_view_outlives_the_file_handle_and_the_name() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"0123456789").unwrap();
        let view = map_read_only(file.as_file(), 10).unwrap().slice(3..6);
        drop(file);
        assert_eq!(&view[..], b"345");
    }

    #[test]
    fn another_length_is_refused() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"0123456789").unwrap();
        for len_bytes in [0, 9, 11] {
            assert!(map_read_only(file.as_file(), len_bytes).is_err(), "{len_bytes}");
        }
        assert!(map_read_only(tempfile::tempfile().as_ref().unwrap(), 0).unwrap().is_empty());
    }

    #[test]
    fn zeros_are_zeros() {
        assert!(map_zeros(0).unwrap().is_empty());
        let zeros = map_zeros(5000).unwrap();
        assert!(zeros.len() == 5000 && zeros.iter().all(|&byte| byte == 0));
    }
}
