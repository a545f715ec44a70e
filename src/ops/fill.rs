//! Synthetic contents of device memory: stored elements of a weight by the formula of synthetic checkpoints, and rows of the caches.

use bytemuck::{Pod, Zeroable};

use crate::checkpoint::spec::TensorSpec;
use crate::checkpoint::synth::{self, Rule, SynthError};
use crate::device::{Device, DeviceError};
use crate::ops::case::OpCase;
use crate::ops::round_fp4::{KEY_CODES_BYTES, KEY_ROW_BYTES};
use crate::ops::round_fp8::{CACHE_FP8_DIMS, CACHE_ROW_BYTES, CACHE_SCALES_BYTES};
use crate::tensor::format::{f32_to_bf16, f32_to_e2m1, f32_to_f8e4m3fn};

mod cases;

/// Threads of a block, and blocks at most.
const N_THREADS: u32 = 256;
const MAX_BLOCKS: u64 = 1 << 14;
/// Bytes that a thread makes at a time.
const PIECE_BYTES: u64 = 16;

/// The kernel's numbers of its rules.
const BF16: u32 = 0;
const F32: u32 = 1;
const FP8: u32 = 2;
const MXFP4: u32 = 3;
const SCALE: u32 = 4;
const KV_ROW: u32 = 5;
const INDEX_ROW: u32 = 6;

/// Rows that a cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheRows {
    /// KV rows, about normal.
    Kv,
    /// Indexer keys, about normal.
    Index,
    /// The compressors' raw rows in f32, about normal.
    Raw,
}

/// Where parts of a fill begin, and their length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Address of the first, a multiple of 16.
    pub out: u64,
    /// Bytes of each.
    pub n_bytes: u64,
    /// Bytes from one to the next, a multiple of 16.
    pub stride_bytes: u64,
    /// Parts; elements are counted on from one to the next.
    pub n: u16,
}

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct FillArgs {
    /// The first part.
    pub out: u64, // [parts, n_bytes], each at a multiple of 16
    /// What an element's index is added to before it is mixed.
    pub noise: u64,
    /// Index of the first stored element; of rows the first byte's, a multiple of a row's.
    pub first: u64,
    /// Bytes of a part: whole elements, and where another part follows, a multiple of 4.
    pub n_bytes: u64,
    /// Bytes from one part to the next.
    pub stride_bytes: u64,
    /// Which rule.
    pub rule: u32,
    /// The least scale byte.
    pub first_scale: u32,
    /// Factor of bf16 and f32 elements.
    pub gain: f32,
    /// What is added to bf16 elements.
    pub offset: f32,
}

const _: () = assert!(size_of::<FillArgs>() == 56);

impl FillArgs {
    /// Arguments for some stored elements of a weight; where they go is the caller's to say.
    ///
    /// # Errors
    /// The formula has no rule for the tensor, or none that a device needs.
    pub fn of_weight(spec: &TensorSpec, seed: u64, first: u64) -> Result<Self, SynthError> {
        let args = Self { noise: synth::noise_base(seed, &spec.name), first, ..Self::default() };
        match synth::rule(spec)? {
            Rule::Bf16 { gain, offset } => Ok(Self { rule: BF16, gain, offset, ..args }),
            Rule::F32 { gain } => Ok(Self { rule: F32, gain, ..args }),
            Rule::Fp8 => Ok(Self { rule: FP8, ..args }),
            Rule::Mxfp4 => Ok(Self { rule: MXFP4, ..args }),
            Rule::Scale { first } => Ok(Self { rule: SCALE, first_scale: first.into(), ..args }),
            Rule::HyperScale | Rule::ExpertTable { .. } => {
                Err(SynthError::NoRule { tensor: spec.name.clone(), form: spec.form() })
            }
        }
    }

    /// Arguments for rows of a cache; `seed` tells one cache from another.
    #[must_use]
    pub fn of_rows(rows: CacheRows, seed: u64) -> Self {
        let rule = match rows {
            CacheRows::Kv => KV_ROW,
            CacheRows::Index => INDEX_ROW,
            CacheRows::Raw => F32,
        };
        Self { rule, gain: 1.0, noise: synth::noise_base(seed, "rows"), ..Self::default() }
    }
}

/// Fills the parts.
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &FillArgs, parts: Parts) -> Result<(), DeviceError> {
    let Parts { out, n_bytes, stride_bytes, n } = parts;
    assert!(
        out.is_multiple_of(16) && stride_bytes.is_multiple_of(16),
        "fill: out: {out:#x} + {stride_bytes}, want 16s"
    );
    assert!(n < 2 || n_bytes.is_multiple_of(4), "fill: n_bytes: {n_bytes}, want a multiple of 4");
    if n == 0 || n_bytes == 0 {
        return Ok(());
    }
    let n_blocks = n_bytes.div_ceil(PIECE_BYTES * u64::from(N_THREADS)).min(MAX_BLOCKS) as u32;
    let args = FillArgs { out, n_bytes, stride_bytes, ..*args };
    device.launch(device.kernel("fill")?, [n_blocks, n.into(), 1], N_THREADS, &args)
}

/// Byte `index` behind the start of element 0, by the kernel's rule. For weights [`synth::Generator`] is a second reference.
#[must_use]
pub fn reference(args: &FillArgs, index: u64) -> u8 {
    let sum = |i: u64| synth::noise_sum(args.noise, i);
    let z = |i: u64| synth::scaled(sum(i));
    let byte_of = |bytes: &[u8]| bytes[index as usize % bytes.len()];
    let fp8 = || f32_to_f8e4m3fn(z(index) * 32.0);
    let pair = || f32_to_e2m1(z(2 * index) * 2.0) | f32_to_e2m1(z(2 * index + 1) * 2.0) << 4;
    let third = || (sum(index) % 3) as u8;
    match args.rule {
        BF16 => byte_of(&f32_to_bf16(z(index / 2) * args.gain + args.offset).to_le_bytes()),
        F32 => byte_of(&(z(index / 4) * args.gain).to_le_bytes()),
        FP8 => fp8(),
        MXFP4 => pair(),
        SCALE => args.first_scale as u8 + third(),
        KV_ROW => {
            let scales_at = CACHE_ROW_BYTES - CACHE_SCALES_BYTES;
            match index as usize % CACHE_ROW_BYTES {
                at if at < CACHE_FP8_DIMS => fp8(),
                at if at < scales_at => byte_of(&f32_to_bf16(z(index / 2 * 2)).to_le_bytes()),
                at if at + 1 < CACHE_ROW_BYTES => 121 + third(),
                _ => 0,
            }
        }
        _ if index as usize % KEY_ROW_BYTES < KEY_CODES_BYTES => pair(),
        _ => 125 + third(),
    }
}

/// The kernel's cases.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    cases::cases()
}
