//! The bytes of one compressed row and of one indexer key: encoding is lossless for rows that were rounded first.

use crate::tensor::format::{
    bf16_to_f32, e2m1_to_f32, e8m0_to_f32, exp2i, f8e4m3fn_to_f32, f32_to_bf16, f32_to_e2m1, f32_to_f8e4m3fn,
};

/// Columns of a KV row that share one FP8 scale.
pub const KV_GROUP: usize = 64;
/// Columns of an indexer key that share one E2M1 scale.
pub const INDEX_GROUP: usize = 32;

static F8_VALUES: [f32; 256] = f8_values();

/// How compressed rows, indexer keys and the window rows of a checkpoint are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowFormat {
    /// f32, nothing rounded.
    Exact,
    /// KV rows: FP8 codes of the unrotated dims, one scale byte for 64 of them (and a byte of padding where their number is
    /// odd), then the rotary dims in f32. Indexer keys: E2M1, low nibble first, then one scale byte for 32 dims.
    Kvq,
    /// As `Kvq`, but as kernels read it: the rotary dims are BF16 and come before the scale bytes.
    Device,
}

/// Dims of the rows, all from the checkpoint's config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowDims {
    /// Dims of a KV row, rotary ones included.
    pub head_dim: usize,
    /// Rotary dims, the last of each row.
    pub rope_dim: usize,
    /// Dims of an indexer key.
    pub index_head_dim: usize,
}

impl RowDims {
    const fn nope_dim(self) -> usize {
        self.head_dim - self.rope_dim
    }

    const fn n_kv_scale_bytes(self) -> usize {
        (self.nope_dim() / KV_GROUP).next_multiple_of(2)
    }
}

impl RowFormat {
    /// Bytes of one KV row.
    #[must_use]
    pub const fn kv_row_bytes(self, dims: RowDims) -> usize {
        match self {
            Self::Exact => dims.head_dim * 4,
            Self::Kvq => dims.nope_dim() + dims.n_kv_scale_bytes() + dims.rope_dim * 4,
            Self::Device => dims.nope_dim() + dims.n_kv_scale_bytes() + dims.rope_dim * 2,
        }
    }

    /// Bytes of one indexer key.
    #[must_use]
    pub const fn index_row_bytes(self, dims: RowDims) -> usize {
        match self {
            Self::Exact => dims.index_head_dim * 4,
            Self::Kvq | Self::Device => dims.index_head_dim / 2 + dims.index_head_dim / INDEX_GROUP,
        }
    }

    /// Stores a KV row `[head_dim]`; unless the format is `Exact` its values must already lie on the grid, so that nothing is lost.
    pub fn encode_kv(self, dims: RowDims, row: &[f32], out: &mut [u8]) {
        if self == Self::Exact {
            return put_f32(row, out);
        }
        let (nope, rope) = row.split_at(dims.nope_dim());
        let (codes, rest) = out.split_at_mut(dims.nope_dim());
        let (scales, rope_out) = match self {
            Self::Device => swap(rest.split_at_mut(dims.rope_dim * 2)),
            _ => rest.split_at_mut(dims.n_kv_scale_bytes()),
        };
        scales.fill(0);
        for (group, (values, codes)) in nope.chunks(KV_GROUP).zip(codes.chunks_mut(KV_GROUP)).enumerate() {
            let exponent = covering_exponent(values, 448.0);
            scales[group] = (exponent + 127) as u8;
            let inverse = exp2i(-exponent);
            for (code, value) in codes.iter_mut().zip(values) {
                *code = f32_to_f8e4m3fn(value * inverse);
            }
        }
        if self == Self::Device { put_bf16(rope, rope_out) } else { put_f32(rope, rope_out) }
    }

    /// Reads a KV row back.
    pub fn decode_kv(self, dims: RowDims, bytes: &[u8], row: &mut [f32]) {
        if self == Self::Exact {
            return get_f32(bytes, row);
        }
        let (nope, rope) = row.split_at_mut(dims.nope_dim());
        let (codes, rest) = bytes.split_at(dims.nope_dim());
        let (scales, rope_bytes) = match self {
            Self::Device => swap(rest.split_at(dims.rope_dim * 2)),
            _ => rest.split_at(dims.n_kv_scale_bytes()),
        };
        for (group, (values, codes)) in nope.chunks_mut(KV_GROUP).zip(codes.chunks(KV_GROUP)).enumerate() {
            let scale = e8m0_to_f32(scales[group]);
            for (value, &code) in values.iter_mut().zip(codes) {
                *value = F8_VALUES[usize::from(code)] * scale;
            }
        }
        if self == Self::Device { get_bf16(rope_bytes, rope) } else { get_f32(rope_bytes, rope) }
    }

    /// Stores an indexer key `[index_head_dim]`; unless the format is `Exact` its values must already lie on the grid.
    pub fn encode_index(self, dims: RowDims, row: &[f32], out: &mut [u8]) {
        if self == Self::Exact {
            return put_f32(row, out);
        }
        let (codes, scales) = out.split_at_mut(dims.index_head_dim / 2);
        for (group, values) in row.chunks(INDEX_GROUP).enumerate() {
            let exponent = covering_exponent(values, 6.0);
            scales[group] = (exponent + 127) as u8;
            let inverse = exp2i(-exponent);
            let codes = &mut codes[group * INDEX_GROUP / 2..];
            for (code, pair) in codes.iter_mut().zip(values.chunks(2)) {
                *code = f32_to_e2m1(pair[0] * inverse) | (f32_to_e2m1(pair[1] * inverse) << 4);
            }
        }
    }

    /// Reads an indexer key back.
    pub fn decode_index(self, dims: RowDims, bytes: &[u8], row: &mut [f32]) {
        if self == Self::Exact {
            return get_f32(bytes, row);
        }
        let (codes, scales) = bytes.split_at(dims.index_head_dim / 2);
        for (group, values) in row.chunks_mut(INDEX_GROUP).enumerate() {
            let scale = e8m0_to_f32(scales[group]);
            let table: [f32; 16] = std::array::from_fn(|code| e2m1_to_f32(code as u8) * scale);
            let codes = &codes[group * INDEX_GROUP / 2..];
            for (pair, &code) in values.chunks_mut(2).zip(codes) {
                pair[0] = table[usize::from(code & 15)];
                pair[1] = table[usize::from(code >> 4)];
            }
        }
    }
}

const fn f8_values() -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = f8e4m3fn_to_f32(code as u8);
        code += 1;
    }
    values
}

/// The least exponent e in -126..=120 with `max |values| <= largest * 2^e`. Values on the grid of a larger exponent that fit a
/// smaller one lie on that one's grid too, so this loses nothing.
fn covering_exponent(values: &[f32], largest: f32) -> i32 {
    let amax = values.iter().fold(0f32, |amax, value| amax.max(value.abs()));
    // One below the quotient's exponent is always too small or exactly enough.
    let quotient = (amax / largest).max(f32::MIN_POSITIVE);
    let exponent = (quotient.to_bits() >> 23) as i32 - 127;
    let exponent = if amax > largest * exp2i(exponent) { exponent + 1 } else { exponent };
    exponent.clamp(-120, 120)
}

fn swap<T>((a, b): (T, T)) -> (T, T) {
    (b, a)
}

fn put_f32(values: &[f32], out: &mut [u8]) {
    for (bytes, value) in out.chunks_exact_mut(4).zip(values) {
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

fn get_f32(bytes: &[u8], values: &mut [f32]) {
    for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(4)) {
        *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
}

fn put_bf16(values: &[f32], out: &mut [u8]) {
    for (bytes, value) in out.chunks_exact_mut(2).zip(values) {
        bytes.copy_from_slice(&f32_to_bf16(*value).to_le_bytes());
    }
}

fn get_bf16(bytes: &[u8], values: &mut [f32]) {
    for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(2)) {
        *value = bf16_to_f32(u16::from_le_bytes([bytes[0], bytes[1]]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIMS: RowDims = RowDims { head_dim: 512, rope_dim: 64, index_head_dim: 128 };

    fn noise(i: usize) -> f32 {
        let x = (i as u32).wrapping_mul(0x9E37_79B9) ^ 0x5bd1_e995;
        let x = (x ^ (x >> 15)).wrapping_mul(0x85eb_ca6b);
        (x ^ (x >> 13)) as f32 / u32::MAX as f32 * 2.0 - 1.0
    }

    #[test]
    fn sizes_are_the_documented_ones() {
        assert_eq!(RowFormat::Kvq.kv_row_bytes(DIMS), 712);
        assert_eq!(RowFormat::Kvq.index_row_bytes(DIMS), 68);
        assert_eq!(RowFormat::Device.kv_row_bytes(DIMS), 584);
        assert_eq!(RowFormat::Device.index_row_bytes(DIMS), 68);
        assert_eq!(RowFormat::Exact.kv_row_bytes(DIMS), 2048);
        assert_eq!(RowFormat::Exact.index_row_bytes(DIMS), 512);
    }

    #[test]
    fn exact_rows_keep_every_bit() {
        let row: Vec<f32> = (0..512).map(|i| noise(i) * 1e-30).collect();
        let mut bytes = vec![0xAA; 2048];
        RowFormat::Exact.encode_kv(DIMS, &row, &mut bytes);
        let mut back = vec![0.0; 512];
        RowFormat::Exact.decode_kv(DIMS, &bytes, &mut back);
        assert!(row.iter().zip(&back).all(|(a, b)| a.to_bits() == b.to_bits()));
    }

    /// Rows on the grid (any scale, maxima at both ends of what one scale covers, zeros, all-zero groups) come back bit for bit.
    #[test]
    fn kvq_rows_on_the_grid_keep_every_bit() {
        for trial in 0..400usize {
            let scale = exp2i((trial % 60) as i32 - 32);
            let row: Vec<f32> = (0..512)
                .map(|i| match i {
                    448.. => noise(trial * 512 + i) * 3.7,
                    _ if i / 64 == trial % 9 => 0.0,
                    _ => {
                        scale * f8e4m3fn_to_f32(((trial * 31 + i * 7) % 0x7F) as u8 | if i % 3 == 0 { 0x80 } else { 0 })
                    }
                })
                .collect();
            let mut bytes = vec![0xAA; 712];
            RowFormat::Kvq.encode_kv(DIMS, &row, &mut bytes);
            let mut back = vec![f32::NAN; 512];
            RowFormat::Kvq.decode_kv(DIMS, &bytes, &mut back);
            for i in 0..512 {
                assert_eq!(row[i].to_bits(), back[i].to_bits(), "trial {trial} dim {i}");
            }
            let row: Vec<f32> =
                row.iter().enumerate().map(|(i, x)| if i < 448 { *x } else { bf16_to_f32(f32_to_bf16(*x)) }).collect();
            let mut device = vec![0xAA; 584];
            RowFormat::Device.encode_kv(DIMS, &row, &mut device);
            RowFormat::Device.decode_kv(DIMS, &device, &mut back);
            assert_eq!(
                (&row, &bytes[..448], &bytes[448..456]),
                (&back, &device[..448], &device[576..]),
                "trial {trial}"
            );
            let key: Vec<f32> = (0..128).map(|i| scale * e2m1_to_f32(((trial * 5 + i * 3) % 16) as u8)).collect();
            let mut bytes = vec![0xAA; 68];
            RowFormat::Kvq.encode_index(DIMS, &key, &mut bytes);
            let mut back = vec![f32::NAN; 128];
            RowFormat::Kvq.decode_index(DIMS, &bytes, &mut back);
            assert!(key.iter().zip(&back).all(|(a, b)| a.to_bits() == b.to_bits()), "trial {trial}");
        }
    }

    #[test]
    fn half_full_groups_are_lossless_at_the_edges_of_a_scale() {
        // 224 s under scale s is 448 s/2 under the next scale down; 448 s is the last value of scale s.
        for top in [224.0, 240.0, 448.0] {
            let mut row = vec![0.0; 512];
            row[0] = top;
            row[1] = -2f32.powi(-9);
            let mut bytes = vec![0; 712];
            RowFormat::Kvq.encode_kv(DIMS, &row, &mut bytes);
            let mut back = vec![1.0; 512];
            RowFormat::Kvq.decode_kv(DIMS, &bytes, &mut back);
            assert_eq!((back[0], back[1]), (row[0], row[1]));
        }
    }
}
