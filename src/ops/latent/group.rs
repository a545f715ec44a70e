//! The compressed rows of completed groups: pooled, normed, rotated and stored in their blocks.

use bytemuck::{Pod, Zeroable};

use crate::device::Device;
use crate::ops::case::batch::{
    Batch, N_SLOTS, Runs, Worst, block, home, is_garbage, n_blocks, rope_table, row_noise, run_everywhere, slot,
};
use crate::ops::case::data::{Noise, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::compress::reference;
use crate::ops::hadamard;
use crate::ops::latent::{LatentArgs, launch};
use crate::ops::rms_norm;
use crate::ops::rope;

/// What a compressor has and where its rows go, a part of [`LatentArgs`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct GroupArgs {
    /// Values of the step's rows.
    pub a: u64, // [T, CW] f32
    /// Logits of the step's rows, without the positional term.
    pub s: u64, // [T, CW] f32
    /// Positional term of each place in a group.
    pub ape: u64, // [ratio, CW] f32
    /// Weight of the norm.
    pub norm: u64, // [RD] f32
    /// Slot 0's ring of raw rows: values, then logits with the positional term.
    pub ring: u64, // [n_ring, 2*CW] f32
    /// This layer's rows in block 0.
    pub blocks: u64, // [256/ratio, row_bytes] u8
    /// RD: 512, or 128 for indexer keys.
    pub row_dim: u32,
    /// Rows of a ring.
    pub n_ring: u32,
    /// Bytes of a stored row: 584, or 68 for indexer keys.
    pub row_bytes: u32,
    /// 1 for indexer keys, else 0.
    pub is_index: u32,
    /// CW: twice RD where groups overlap, else RD.
    pub n_cols: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<GroupArgs>() == 72);

impl GroupArgs {
    /// Panics on shapes that the kernel is not written for.
    pub(super) fn check(&self, ratio: u32) {
        let want = if self.is_index == 0 { (512, 584) } else { (128, 68) };
        let got = (self.row_dim, self.row_bytes);
        assert!(got == want, "latent: RD, row bytes: {got:?}, want {want:?}");
        let n_cols = if ratio == 4 { 2 * self.row_dim } else { self.row_dim };
        assert!(self.n_cols == n_cols, "latent: CW: {}, want {n_cols}", self.n_cols);
    }
}

/// Bytes before the layer's rows in a block, and after them.
const MARGIN_BYTES: usize = 16;

/// A layer of a case.
#[derive(Clone, Copy)]
struct Layer {
    ratio: usize,
    is_index: bool,
}

/// The cases of groups: both ratios and the indexer's keys; groups inside a run, over the border of ring and run, and over the
/// ring's end; the first group; runs that complete nothing.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    let kv4 = Layer { ratio: 4, is_index: false };
    let kv128 = Layer { ratio: 128, is_index: false };
    let index = Layer { ratio: 4, is_index: true };
    let of = |name: &str, layer: Layer, runs: Runs| {
        let batch = Batch::new(runs);
        OpCase::new("latent", format!("group, {name}"), move |device| check(device, layer, &batch))
    };
    vec![
        of("ratio 4, a prompt, decode rows and a ring's wrap", kv4, &[(0, 0, 11), (1, 7, 1), (2, 5, 1), (3, 38, 6)]),
        of("ratio 4, chunks that begin inside groups", kv4, &[(0, 3, 2), (1, 1, 3), (2, 1021, 8)]),
        of("ratio 4, nothing completed", kv4, &[(0, 0, 3), (4, 8, 1)]),
        of("ratio 128, a group in the run and one over its border", kv128, &[(0, 0, 130), (1, 250, 7)]),
        of("ratio 128, one row ends the group", kv128, &[(2, 127, 1), (0, 1023, 1), (1, 300, 1)]),
        of("index keys, a prompt and decode rows", index, &[(0, 0, 9), (1, 7, 1), (2, 39, 2)]),
        of("index keys, no row", index, &[]),
    ]
}

impl Layer {
    fn row_dim(self) -> usize {
        if self.is_index { 128 } else { 512 }
    }

    fn row_bytes(self) -> usize {
        if self.is_index { 68 } else { 584 }
    }

    fn n_cols(self) -> usize {
        if self.ratio == 4 { 2 * self.row_dim() } else { self.row_dim() }
    }

    fn n_ring(self) -> usize {
        if self.ratio == 4 { 40 } else { 160 }
    }

    fn block_stride(self) -> usize {
        256 / self.ratio * self.row_bytes() + 2 * MARGIN_BYTES
    }

    fn slot_stride(self) -> usize {
        self.n_ring() * 2 * self.n_cols() * 4 + MARGIN_BYTES
    }

    fn ape(self) -> Vec<f32> {
        Noise::new(20).floats(self.ratio * self.n_cols())
    }

    fn norm(self) -> Vec<f32> {
        Noise::new(21).floats(self.row_dim())
    }

    /// Values and logits of a position, without the positional term.
    fn raw(self, seq: usize, position: usize) -> [Vec<f32>; 2] {
        let mut noise = row_noise(22, seq, position);
        let values = noise.floats(self.n_cols());
        [values, noise.floats(self.n_cols()).iter().map(|x| 4.0 * x).collect()]
    }

    /// Values, and logits with the positional term.
    fn stored(self, ape: &[f32], seq: usize, position: usize) -> [Vec<f32>; 2] {
        let [values, mut gates] = self.raw(seq, position);
        let term = &ape[position % self.ratio * self.n_cols()..];
        gates.iter_mut().zip(term).for_each(|(gate, term)| *gate += term);
        [values, gates]
    }

    /// Where a group's row lies in the pool of blocks.
    fn place(self, seq: usize, group: usize) -> usize {
        let n_rows = 256 / self.ratio;
        block(seq, group / n_rows) * self.block_stride() + MARGIN_BYTES + group % n_rows * self.row_bytes()
    }

    /// The rings of all slots as earlier steps left them: NaN where nothing is needed.
    fn rings(self, batch: &Batch) -> Vec<f32> {
        let mut rings = vec![f32::NAN; N_SLOTS * self.slot_stride() / 4];
        let (width, ape) = (2 * self.n_cols(), self.ape());
        for run in &batch.runs {
            for position in run.first_pos.saturating_sub(self.n_ring())..run.first_pos {
                let at = slot(run.seq) * self.slot_stride() / 4 + position % self.n_ring() * width;
                rings[at..at + width].copy_from_slice(&self.stored(&ape, run.seq, position).concat());
            }
        }
        rings
    }

    /// The row of a group in f64, before it is rounded.
    fn reference(self, seq: usize, group: usize) -> Vec<f64> {
        let (dim, ratio) = (self.row_dim(), self.ratio);
        let halves =
            if ratio == 4 { [(group.wrapping_sub(1), 0), (group, dim)] } else { [(usize::MAX, 0), (group, 0)] };
        let (ape, mut values, mut gates) = (self.ape(), Vec::new(), Vec::new());
        for (group, first) in halves.into_iter().filter(|half| half.0 != usize::MAX) {
            for position in group * ratio..(group + 1) * ratio {
                let row = self.stored(&ape, seq, position);
                values.push(row[0][first..first + dim].to_vec());
                gates.push(row[1][first..first + dim].to_vec());
            }
        }
        let (values, gates): (Vec<&[f32]>, Vec<&[f32]>) =
            (values.iter().map(Vec::as_slice).collect(), gates.iter().map(Vec::as_slice).collect());
        let to_f32 = |row: Vec<f64>| row.iter().map(|x| *x as f32).collect::<Vec<f32>>();
        let row = rms_norm::reference(&to_f32(reference(&values, &gates)), Some(&self.norm()), 1e-6);
        let row = rope::reference(&rope_table(), group * ratio, &to_f32(row), false);
        if self.is_index { hadamard::reference(&to_f32(row)) } else { row }
    }
}

/// The stored row of every row that completes a group, garbage for the others; all other bytes must stay garbage.
fn run(device: &Device, layer: Layer, batch: &Batch) -> Result<Vec<u8>, CaseError> {
    let (step, width) = (batch.upload(device, |_, _| 0)?, layer.n_cols());
    let a = upload(device, &batch.values(width, |seq, position| layer.raw(seq, position)[0].clone()))?;
    let s = upload(device, &batch.values(width, |seq, position| layer.raw(seq, position)[1].clone()))?;
    let (ape, norm, freqs) = (upload(device, &layer.ape())?, upload(device, &layer.norm())?, rope_table());
    let (freqs, ring) = (upload(device, freqs.freqs())?, upload(device, &layer.rings(batch))?);
    let blocks = upload(device, &vec![0xFFu8; n_blocks(1280) * layer.block_stride()])?;
    let group = GroupArgs {
        a: a.address(),
        s: s.address(),
        ape: ape.address(),
        norm: norm.address(),
        ring: ring.address(),
        blocks: blocks.address() + MARGIN_BYTES as u64,
        row_dim: layer.row_dim() as u32,
        n_ring: layer.n_ring() as u32,
        row_bytes: layer.row_bytes() as u32,
        is_index: u32::from(layer.is_index),
        n_cols: width as u32,
        pad: 0,
    };
    let args = LatentArgs {
        step: step.step,
        groups: [group, GroupArgs::default()],
        freqs: freqs.address(),
        slot_stride_bytes: layer.slot_stride() as u64,
        block_stride_bytes: layer.block_stride() as u64,
        n_groups: 1,
        ratio: layer.ratio as u32,
        eps: 1e-6,
        ..LatentArgs::default()
    };
    launch(device, &args, batch.n_bucket() as u32)?;
    let (mut blocks, mut rows) = (home::<u8>(device, &blocks)?, Vec::new());
    for (seq, position) in batch.rows() {
        let mut row = vec![0xFF; layer.row_bytes()];
        if (position + 1).is_multiple_of(layer.ratio) {
            let at = layer.place(seq, position / layer.ratio);
            row.swap_with_slice(&mut blocks[at..at + layer.row_bytes()]);
        }
        rows.extend(row);
    }
    if !is_garbage(&blocks) {
        return Err(CaseError::Rule("a write outside the rows of completed groups".into()));
    }
    rows.resize(batch.n_bucket() * layer.row_bytes(), 0xFF);
    Ok(rows)
}

fn check(device: &Device, layer: Layer, batch: &Batch) -> Result<Deviation, CaseError> {
    let got = run_everywhere(batch, |batch| run(device, layer, batch))?;
    let mut worst = Worst::default();
    for ((seq, position), got) in batch.rows().into_iter().zip(got.chunks(layer.row_bytes())) {
        if !(position + 1).is_multiple_of(layer.ratio) {
            continue;
        }
        let want = layer.reference(seq, position / layer.ratio);
        // Two sums of up to 128 terms, exp, norm: errors of 1e-6 on values of up to 3, before the row's own rounding.
        if layer.is_index {
            worst.add_e2m1(&crate::ops::case::batch::decode_key(got), &want, 2e-5);
        } else {
            worst.add_kv_row(got, &want, 1e-5);
        }
    }
    Ok(worst.deviation())
}
