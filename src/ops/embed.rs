//! The embedding: one row of a stored matrix a token, as f32.

pub mod device;

use crate::device::cpu::Cpu;
use crate::device::cpu::expand::expand_row;
use crate::ids::TokenId;
use crate::tensor::matrix::Matrix;

/// Elements that are worth handing to another thread.
const MIN_TILE_ELEMENTS: usize = 1 << 16;

/// Writes the row of each token. Ids are checked before they reach a device; one out of range panics.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{Rng, Stored, cpus, matrix};

    #[test]
    fn rows_are_exact() {
        let mut rng = Rng(61);
        let m = matrix(&mut rng, Stored::Bf16, 9, 35);
        for ids in [vec![], vec![8], vec![0, 8, 3, 3]] {
            let ids: Vec<TokenId> = ids.into_iter().map(TokenId).collect();
            for cpu in cpus() {
                let mut out = vec![f32::NAN; ids.len() * 35];
                embed(&cpu, &m, &ids, &mut out);
                assert_eq!(out.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>(), reference(&m, &ids));
            }
        }
    }

    #[test]
    #[should_panic(expected = "token 9, want below 9")]
    fn an_id_past_the_end_is_refused() {
        let m = matrix(&mut Rng(62), Stored::Bf16, 9, 35);
        embed(&cpus()[0], &m, &[TokenId(9)], &mut [0.0; 35]);
    }
}
