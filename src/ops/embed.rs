//! The embedding: one row of a stored matrix a token, as f32.

use crate::device::cpu::Cpu;
use crate::device::cpu::expand::expand_row;
use crate::ids::TokenId;
use crate::tensor::matrix::Matrix;

/// Elements that are worth handing to another thread.
const MIN_TILE_ELEMENTS: usize = 1 << 16;

/// Writes the row of each token. Ids are checked before they reach a device (faults F5); one out of range panics.
pub fn embed(cpu: &Cpu, matrix: &Matrix, token_ids: &[TokenId], out: &mut [f32] /* [T, D] f32 */) {
    let d = matrix.n_cols;
    assert!(out.len() == token_ids.len() * d, "embed: T: out of {}, want {} x {d}", out.len(), token_ids.len());
    cpu.par_chunks(out, d, MIN_TILE_ELEMENTS.div_ceil(d.max(1)), |t, out| {
        let row = token_ids[t].index();
        assert!(row < matrix.n_rows, "embed: V: token {row}, want below {}", matrix.n_rows);
        expand_row(cpu.level(), matrix, row, out);
    });
}

/// The same rows, element by element.
#[must_use]
pub fn reference(matrix: &Matrix, token_ids: &[TokenId]) -> Vec<f64> {
    let rows = token_ids.iter().map(|id| id.index());
    rows.flat_map(|r| (0..matrix.n_cols).map(move |c| f64::from(super::linear::element(matrix, r, c)))).collect()
}
