//! What this machine has, read from /proc and /sys: memory, limits and device nodes. Where a file is missing (macOS), the
//! answer is `None`.

use std::path::{Path, PathBuf};

/// Memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Installed, or the container's limit where that is lower.
    pub total_bytes: u64,
    /// Free or easily freed, inside the container's limit.
    pub available_bytes: u64,
}

/// Memory that this process may use.
#[must_use]
pub fn memory() -> Option<Memory> {
    let machine = parse_meminfo(&read("/proc/meminfo")?)?;
    let number = |path: &str| read(path).and_then(|text| text.trim().parse::<u64>().ok());
    let limit = number("/sys/fs/cgroup/memory.max").or_else(|| number("/sys/fs/cgroup/memory/memory.limit_in_bytes"));
    let used =
        number("/sys/fs/cgroup/memory.current").or_else(|| number("/sys/fs/cgroup/memory/memory.usage_in_bytes"));
    Some(within_limit(machine, limit, used.unwrap_or(0)))
}

/// The processor's name.
#[must_use]
pub fn cpu_name() -> Option<String> {
    parse_cpu_name(&read("/proc/cpuinfo")?)
}

/// Size of the file system at /dev/shm; `None` where there is none.
#[must_use]
pub fn shm_bytes() -> Option<u64> {
    let size = parse_shm(&read("/proc/mounts")?)?;
    // Without a size of its own a tmpfs may take half the memory.
    size.or_else(|| parse_meminfo(&read("/proc/meminfo")?).map(|memory| memory.total_bytes / 2))
}

/// The soft limit of a line of /proc/self/limits, such as `Max open files`; `None` when unlimited or unknown.
#[must_use]
pub fn limit(name: &str) -> Option<u64> {
    parse_limit(&read("/proc/self/limits")?, name)
}

/// The first file in `folders` whose name is `stem` or begins with `stem.` (libraries carry their version at the end).
#[must_use]
pub fn find_library(folders: &[PathBuf], stem: &str) -> Option<PathBuf> {
    folders.iter().find_map(|folder| {
        let mut names: Vec<PathBuf> = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).collect();
        names.sort();
        names.into_iter().find(|path| is_library(path, stem))
    })
}

fn is_library(path: &Path, stem: &str) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.strip_prefix(stem).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn parse_meminfo(text: &str) -> Option<Memory> {
    let kib = |key: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        line.split_whitespace().next()?.parse().ok()
    };
    Some(Memory { total_bytes: kib("MemTotal")? << 10, available_bytes: kib("MemAvailable")? << 10 })
}

fn within_limit(machine: Memory, limit: Option<u64>, used: u64) -> Memory {
    // Without a limit, version 1 of control groups gives a number larger than any memory.
    match limit.filter(|limit| *limit < machine.total_bytes) {
        Some(limit) => {
            Memory { total_bytes: limit, available_bytes: machine.available_bytes.min(limit.saturating_sub(used)) }
        }
        None => machine,
    }
}

fn parse_cpu_name(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// The size of /dev/shm: `None` when it is not mounted, `Some(None)` when its mount names no size.
fn parse_shm(mounts: &str) -> Option<Option<u64>> {
    let line = mounts.lines().rfind(|line| line.split(' ').nth(1) == Some("/dev/shm"))?;
    let options = line.split(' ').nth(3)?;
    let size = options.split(',').find_map(|option| option.strip_prefix("size="));
    Some(size.and_then(|size| size.strip_suffix('k').unwrap_or(size).parse::<u64>().ok()).map(|kib| kib << 10))
}

fn parse_limit(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_bytes_and_cut_to_the_container() {
        let machine = parse_meminfo("MemTotal:       1000 kB\nMemFree: 3 kB\nMemAvailable:    800 kB\n").unwrap();
        assert_eq!(machine, Memory { total_bytes: 1000 << 10, available_bytes: 800 << 10 });
        assert_eq!(within_limit(machine, Some(u64::MAX), 5), machine);
        let cut = within_limit(machine, Some(500 << 10), 100 << 10);
        assert_eq!(cut, Memory { total_bytes: 500 << 10, available_bytes: 400 << 10 });
        assert_eq!(within_limit(machine, Some(10), 20).available_bytes, 0);
        assert_eq!(parse_meminfo("MemTotal: 1 kB\n"), None);
    }

    #[test]
    fn the_last_mount_of_shm_counts() {
        let mounts = "tmpfs /dev/shm tmpfs rw,size=64k 0 0\ntmpfs /dev/shm tmpfs rw,relatime,size=65536k 0 0\n";
        assert_eq!(parse_shm(mounts), Some(Some(64 << 20)));
        assert_eq!(parse_shm("tmpfs /dev/shm tmpfs rw,nosuid 0 0\n"), Some(None));
        assert_eq!(parse_shm("tmpfs /run tmpfs rw,size=1k 0 0\n"), None);
    }

    #[test]
    fn limits_and_names_are_found() {
        let text = "Limit  Soft Limit  Hard Limit  Units\nMax open files            20000    30000    files\nMax cpu time  unlimited  unlimited  seconds\n";
        assert_eq!(parse_limit(text, "Max open files"), Some(20_000));
        assert_eq!(parse_limit(text, "Max cpu time"), None);
        assert_eq!(parse_cpu_name("processor : 0\nmodel name\t: A B  C\n"), Some("A B  C".to_owned()));
    }

    #[test]
    fn libraries_are_found_with_any_version() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["libamdhip64.so.7", "libcuda.solid"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let folders = [PathBuf::from("/nowhere"), folder.path().to_owned()];
        assert_eq!(find_library(&folders, "libamdhip64.so"), Some(folder.path().join("libamdhip64.so.7")));
        assert_eq!(find_library(&folders, "libcuda.so"), None);
    }
}
