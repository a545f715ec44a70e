//! The slots' rings take the last rows of every run, once no query of the step needs the rows they replace.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::batch::{Batch, N_SLOTS, Runs, home, row_noise, slot};
use crate::ops::case::data::{Noise, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::round_fp8::CACHE_ROW_BYTES;
use crate::ops::step::Step;

/// Threads of a block, which stores one row.
const N_THREADS: u32 = 256;

/// Arguments of the kernel, field for field. A ring whose address is 0 does not exist in the layer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct RingStoreArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// The step's window rows.
    pub rows: u64, // [T, 584] u8
    /// Slot 0's ring of window rows.
    pub window_ring: u64, // [n_window_ring, 584] u8
    /// The compressor's values.
    pub a: u64, // [T, CW] f32
    /// Its logits, without the positional term.
    pub s: u64, // [T, CW] f32
    /// Its positional term.
    pub ape: u64, // [ratio, CW] f32
    /// Slot 0's ring of raw rows: values, then logits with the positional term.
    pub raw_ring: u64, // [n_raw_ring, 2*CW] f32
    /// As `a`, of the indexer's compressor.
    pub ia: u64, // [T, IW] f32
    /// As `s`, of the indexer's compressor.
    pub is: u64, // [T, IW] f32
    /// As `ape`, of the indexer's compressor.
    pub iape: u64, // [ratio, IW] f32
    /// As `raw_ring`, of the indexer's compressor.
    pub index_ring: u64, // [n_index_ring, 2*IW] f32
    /// From a slot's rings to the next slot's.
    pub slot_stride_bytes: u64,
    /// Rows of the window ring.
    pub n_window_ring: u32,
    /// Rows of the raw ring.
    pub n_raw_ring: u32,
    /// Rows of the indexer's raw ring.
    pub n_index_ring: u32,
    /// CW.
    pub n_raw_cols: u32,
    /// IW.
    pub n_index_cols: u32,
    /// Tokens of a group; 0 where there is no raw ring.
    pub ratio: u32,
}

const _: () = assert!(size_of::<RingStoreArgs>() == 144);

/// Stores what the rings hold of `n_rows` rows (those of the bucket).
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &RingStoreArgs, n_rows: u32) -> Result<(), DeviceError> {
    device.launch(device.kernel("ring_store")?, [n_rows, 1, 1], N_THREADS, args)
}

/// One ring of one slot on the host: the last rows of a run that it holds, by position.
pub fn reference(ring: &mut [u8], row_bytes: usize, first_pos: usize, rows: &[Vec<u8>]) {
    let n_ring = ring.len() / row_bytes;
    for (i, row) in rows.iter().enumerate().skip(rows.len().saturating_sub(n_ring)) {
        let at = (first_pos + i) % n_ring * row_bytes;
        ring[at..at + row_bytes].copy_from_slice(row);
    }
}

/// The kernel's cases: layers with one, two and three rings; one row, fewer rows than a ring, as many, more; positions that wrap.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    let of = |name: &str, rings: Rings, runs: Runs| {
        let batch = Batch::new(runs);
        OpCase::new("ring_store", name, move |device| check(device, &rings, &batch))
    };
    let window = Rings { n_window: 160, raw: None, index: None, ratio: 0 };
    let kv128 = Rings { raw: Some((160, 512)), ratio: 128, ..window };
    let kv4 = Rings { raw: Some((40, 1024)), index: Some((40, 256)), ratio: 4, ..window };
    vec![
        of("window only, single rows", window, &[(0, 0, 1), (3, 159, 1), (1, 160, 1)]),
        of("window only, as many rows as the ring and one more", window, &[(0, 37, 160), (2, 5, 161)]),
        of("ratio 128, a long run", kv128, &[(1, 1000, 333), (4, 12, 2)]),
        of("ratio 4, runs of every length", kv4, &[(0, 3, 41), (1, 39, 3), (2, 7, 40), (3, 0, 1)]),
        of("ratio 4, no row", kv4, &[]),
    ]
}

/// The rings of a case's layer: their rows, and columns of raw rows.
#[derive(Clone, Copy)]
struct Rings {
    n_window: usize,
    raw: Option<(usize, usize)>,
    index: Option<(usize, usize)>,
    ratio: usize,
}

impl Rings {
    /// Bytes of each ring of a slot, one after the other.
    fn sizes(&self) -> [usize; 3] {
        let raw = |ring: Option<(usize, usize)>| ring.map_or(0, |(n, cols)| n * cols * 8);
        [self.n_window * CACHE_ROW_BYTES, raw(self.raw), raw(self.index)]
    }

    fn slot_stride(&self) -> usize {
        self.sizes().iter().sum::<usize>() + 32
    }
}

fn window_row(seq: usize, position: usize) -> Vec<u8> {
    let mut noise = row_noise(30, seq, position);
    (0..CACHE_ROW_BYTES).map(|_| noise.next_u64() as u8).collect()
}

/// A seed's numbers of a position.
fn numbers(seed: u64, n_cols: usize, seq: usize, position: usize) -> Vec<f32> {
    row_noise(seed, seq, position).floats(n_cols)
}

/// A raw row as it is stored.
fn raw_row(seed: u64, ratio: usize, n_cols: usize, seq: usize, position: usize) -> Vec<u8> {
    let ape = Noise::new(seed + 2).floats(ratio * n_cols);
    let term = &ape[position % ratio * n_cols..];
    let gates = numbers(seed + 1, n_cols, seq, position);
    let gates = gates.iter().zip(term).map(|(gate, term)| gate + term);
    numbers(seed, n_cols, seq, position).into_iter().chain(gates).flat_map(f32::to_le_bytes).collect()
}

fn run(device: &Device, rings: &Rings, batch: &Batch) -> Result<Vec<u8>, CaseError> {
    let (step, sizes) = (batch.upload(device, |_, _| 0)?, rings.sizes());
    let mut rows: Vec<u8> = batch.rows().into_iter().flat_map(|(seq, position)| window_row(seq, position)).collect();
    rows.resize(batch.n_bucket() * CACHE_ROW_BYTES, 0);
    let (rows, slots) = (upload(device, &rows)?, upload(device, &vec![0xFFu8; N_SLOTS * rings.slot_stride()])?);
    let values = |seed: u64, ring: Option<(usize, usize)>| {
        let n_cols = ring.map_or(0, |ring| ring.1);
        upload(device, &batch.values(n_cols, |seq, position| numbers(seed, n_cols, seq, position)))
    };
    let terms = |seed: u64, ring: Option<(usize, usize)>| {
        upload(device, &Noise::new(seed).floats(rings.ratio * ring.map_or(0, |ring| ring.1)))
    };
    let (a, s, ape) = (values(31, rings.raw)?, values(32, rings.raw)?, terms(33, rings.raw)?);
    let (ia, is, iape) = (values(41, rings.index)?, values(42, rings.index)?, terms(43, rings.index)?);
    let base = slots.address();
    let ring = |ring: Option<(usize, usize)>, at: usize| if ring.is_some() { base + at as u64 } else { 0 };
    let args = RingStoreArgs {
        step: step.step,
        rows: rows.address(),
        window_ring: base,
        a: a.address(),
        s: s.address(),
        ape: ape.address(),
        raw_ring: ring(rings.raw, sizes[0]),
        ia: ia.address(),
        is: is.address(),
        iape: iape.address(),
        index_ring: ring(rings.index, sizes[0] + sizes[1]),
        slot_stride_bytes: rings.slot_stride() as u64,
        n_window_ring: rings.n_window as u32,
        n_raw_ring: rings.raw.map_or(0, |ring| ring.0 as u32),
        n_index_ring: rings.index.map_or(0, |ring| ring.0 as u32),
        n_raw_cols: rings.raw.map_or(0, |ring| ring.1 as u32),
        n_index_cols: rings.index.map_or(0, |ring| ring.1 as u32),
        ratio: rings.ratio as u32,
    };
    launch(device, &args, batch.n_bucket() as u32)?;
    home(device, &slots)
}

fn check(device: &Device, rings: &Rings, batch: &Batch) -> Result<Deviation, CaseError> {
    let mut want = vec![0xFFu8; N_SLOTS * rings.slot_stride()];
    let sizes = rings.sizes();
    for r in &batch.runs {
        let positions = r.first_pos..r.first_pos + r.n_rows;
        let slot = &mut want[slot(r.seq) * rings.slot_stride()..][..rings.slot_stride()];
        let (window, rest) = slot.split_at_mut(sizes[0]);
        let rows: Vec<Vec<u8>> = positions.clone().map(|position| window_row(r.seq, position)).collect();
        reference(window, CACHE_ROW_BYTES, r.first_pos, &rows);
        let (raw, rest) = rest.split_at_mut(sizes[1]);
        for (seed, ring, bytes) in [(31, rings.raw, raw), (41, rings.index, &mut rest[..sizes[2]])] {
            let Some((_, n_cols)) = ring else { continue };
            let row = |position| raw_row(seed, rings.ratio, n_cols, r.seq, position);
            let rows: Vec<Vec<u8>> = positions.clone().map(row).collect();
            reference(bytes, n_cols * 8, r.first_pos, &rows);
        }
    }
    let got = run(device, rings, batch)?;
    if got != run(device, rings, batch)? {
        return Err(CaseError::Rule("two runs differ".into()));
    }
    Ok(Deviation::exact(&got, &want))
}

#[cfg(test)]
mod tests {
    #[test]
    fn cases_pass() {
        crate::device::testing::run_cases(&super::cases());
    }
}
