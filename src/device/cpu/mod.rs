//! The CPU device: SIMD kernels behind safe, run-time dispatched functions, and the thread pool they share.
#![allow(unsafe_code)] // src/device is the home of unsafe: here it is vector instructions and disjoint writes from threads.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Defines a safe function over [`Level`] from a kernel that is generic over [`simd::Simd`].
macro_rules! simd_fn {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $kernel:ident) => {
        $(#[$meta])*
        $vis fn $name(level: crate::device::cpu::Level, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: this function is only entered where its features are present.
                unsafe { $kernel::<crate::device::cpu::avx2::Avx2>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx2,fma,f16c")]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: this function is only entered where its features are present.
                unsafe { $kernel::<crate::device::cpu::avx512::Avx512>($($arg),*) }
            }
            // SAFETY: a `Level` is only made after the machine was asked for the features of that level.
            unsafe {
                match level.simd() {
                    #[cfg(target_arch = "x86_64")]
                    crate::device::cpu::SimdLevel::Avx512 => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    crate::device::cpu::SimdLevel::Avx2 => avx2($($arg),*),
                    #[cfg(target_arch = "aarch64")]
                    crate::device::cpu::SimdLevel::Neon => $kernel::<crate::device::cpu::neon::Neon>($($arg),*),
                    _ => $kernel::<crate::device::cpu::simd::Portable>($($arg),*),
                }
            }
        }
    };
}

pub mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod expand;
pub mod index;
pub mod linear;
pub mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod row_dot;
pub mod rows;
pub mod simd;
#[cfg(test)]
pub(crate) mod testing;
pub mod tile;

/// An instruction set the kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimdLevel {
    /// Plain Rust; the same bits, slowly.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F as well.
    Avx512,
    /// AArch64.
    Neon,
}

/// A [`SimdLevel`] that this machine was seen to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level(SimdLevel);

/// This machine's processor: what it can do and the threads that do it.
#[derive(Debug)]
pub struct Cpu {
    level: Level,
    pool: rayon::ThreadPool,
}

/// The thread pool could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The instruction set is missing.
    #[error("this machine does not have {0:?}")]
    NoSuchLevel(SimdLevel),
    /// The system refused threads.
    #[error("thread pool of {n_threads}: {source}")]
    Threads {
        /// Threads asked for.
        n_threads: usize,
        /// What the system said.
        source: rayon::ThreadPoolBuildError,
    },
}

impl SimdLevel {
    /// Whether this machine has it.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Self::Avx2.is_available() && is_x86_feature_detected!("avx512f"),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            _ => false,
        }
    }

    /// Every level this machine has, from the slowest.
    #[must_use]
    pub fn available() -> Vec<Self> {
        [Self::Portable, Self::Avx2, Self::Avx512, Self::Neon].into_iter().filter(|l| l.is_available()).collect()
    }
}

impl Level {
    /// The level, if this machine has it.
    #[must_use]
    pub fn new(level: SimdLevel) -> Option<Self> {
        level.is_available().then_some(Self(level))
    }

    /// The best level of this machine.
    #[must_use]
    pub fn best() -> Self {
        Self(SimdLevel::available().pop().unwrap_or(SimdLevel::Portable))
    }

    /// Which it is.
    #[must_use]
    pub fn simd(self) -> SimdLevel {
        self.0
    }
}

impl Cpu {
    /// The best level, one thread for each processor the process may use.
    ///
    /// # Errors
    /// [`CpuError::Threads`] when the system refuses threads.
    pub fn detect() -> Result<Self, CpuError> {
        let n_threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self::build(Level::best(), n_threads)
    }

    /// A chosen level and number of threads: results are the same bits for all of them.
    ///
    /// # Errors
    /// [`CpuError::NoSuchLevel`] when the machine lacks it, [`CpuError::Threads`] when the system refuses threads.
    pub fn with_level(level: SimdLevel, n_threads: usize) -> Result<Self, CpuError> {
        Self::build(Level::new(level).ok_or(CpuError::NoSuchLevel(level))?, n_threads)
    }

    /// The instruction set in use.
    #[must_use]
    pub fn level(&self) -> Level {
        self.level
    }

    /// Threads of the pool.
    #[must_use]
    pub fn n_threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Runs `work` on a thread of the pool. Parallel loops started from there cost a microsecond or two; started from any
    /// other thread each pays for waking the pool. A forward pass should run inside one `install`.
    pub fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.pool.install(work)
    }

    /// Calls `work` for consecutive ranges of at most `tile` that cover `0..n`, on all threads, in no particular order.
    /// One tile runs on the caller without touching the pool.
    pub fn par_tiles(&self, n: usize, tile: usize, work: impl Fn(Range<usize>) + Sync) {
        let tile = tile.max(1);
        let n_tiles = n.div_ceil(tile);
        let n_threads = self.n_threads().min(n_tiles);
        let one = |t: usize| work(t * tile..((t + 1) * tile).min(n));
        if n_threads <= 1 {
            return (0..n_tiles).for_each(one);
        }
        let next = AtomicUsize::new(0);
        // Relaxed: the counter only hands out numbers; the join at the end orders the results.
        let drain = || {
            while let Some(t) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|t| *t < n_tiles) {
                one(t);
            }
        };
        self.pool.install(|| fan_out(n_threads, &drain));
    }

    /// Calls `work(i, chunk)` for every `chunk_len` elements of `out`, `chunks_per_tile` chunks at a time on one thread.
    pub fn par_chunks<T: Send>(
        &self,
        out: &mut [T],
        chunk_len: usize,
        chunks_per_tile: usize,
        work: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let chunk_len = chunk_len.max(1);
        let n_chunks = out.len().div_ceil(chunk_len);
        let shared = Shared::new(out);
        self.par_tiles(n_chunks, chunks_per_tile, |chunks| {
            for i in chunks {
                let range = i * chunk_len..((i + 1) * chunk_len).min(shared.len());
                // SAFETY: chunks do not overlap and `par_tiles` gives each index to one call.
                work(i, unsafe { shared.range(range) });
            }
        });
    }

    fn build(level: Level, n_threads: usize) -> Result<Self, CpuError> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(n_threads.max(1))
            .thread_name(|i| format!("cpu-{i}"))
            .build()
            .map_err(|source| CpuError::Threads { n_threads, source })?;
        Ok(Self { level, pool })
    }
}

/// A mutable slice that several threads write in disjoint parts.
pub(crate) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    owner: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: the only access is `range`, whose callers promise disjoint parts; elements move between threads, hence `Send`.
unsafe impl<T: Send> Sync for Shared<'_, T> {}
// SAFETY: as above; it stands for the exclusive borrow it was made from.
unsafe impl<T: Send> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), owner: std::marker::PhantomData }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// A part of the slice.
    ///
    /// # Safety
    /// No two live parts may overlap.
    #[allow(clippy::mut_from_ref)] // Handing out disjoint parts through a shared reference is what the type is for.
    pub(crate) unsafe fn range(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part {range:?} of {}", self.len);
        // SAFETY: inside the borrowed slice by the assertion; disjoint by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

/// Runs `work` once on each of up to `n` threads of the current pool; on fewer when the others are busy.
fn fan_out(n: usize, work: &(impl Fn() + Sync)) {
    if n <= 1 {
        work();
    } else {
        rayon::join(work, || fan_out(n - 1, work));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_index_once() {
        for n_threads in [1, 2, 3] {
            let cpu = Cpu::with_level(SimdLevel::Portable, n_threads).unwrap();
            for n in [0usize, 1, 7, 64, 65, 1000] {
                for tile in [0, 1, 7, 64, 5000] {
                    let mut seen = vec![0u8; n];
                    cpu.par_chunks(&mut seen, 1, tile, |_, chunk| chunk[0] += 1);
                    assert!(seen.iter().all(|s| *s == 1), "{n_threads} threads, n {n}, tile {tile}");
                }
            }
        }
    }

    #[test]
    fn chunks_know_their_index_and_the_last_may_be_short() {
        let cpu = Cpu::with_level(SimdLevel::Portable, 2).unwrap();
        let mut out = [0usize; 10];
        cpu.par_chunks(&mut out, 4, 1, |i, chunk| chunk.fill(10 * i + chunk.len()));
        assert_eq!(out, [4, 4, 4, 4, 14, 14, 14, 14, 22, 22]);
    }

    #[test]
    fn loops_nest() {
        let cpu = Cpu::with_level(SimdLevel::Portable, 2).unwrap();
        let sum = AtomicUsize::new(0);
        cpu.install(|| {
            cpu.par_tiles(8, 1, |_| {
                cpu.par_tiles(8, 1, |r| {
                    sum.fetch_add(r.start, Ordering::Relaxed);
                });
            });
        });
        assert_eq!(sum.into_inner(), 8 * 28);
    }
}
