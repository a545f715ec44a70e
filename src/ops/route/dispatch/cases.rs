//! Cases of `dispatch`: every output equal to the sorted reference, and nothing written past it.

use super::{DispatchArgs, launch, max_items, reference};
use crate::device::Device;
use crate::ops::case::data::{Noise, download, nan_buffer, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::step::{Step, StepCounts};

/// One step.
#[derive(Clone, Copy, Debug)]
struct Shape {
    n_rows: u32,
    n_experts: u32,
    top_k: u32,
    rows_per_item: u32,
    /// All rows choose the same experts.
    is_uniform: bool,
}

pub(super) fn cases() -> Vec<OpCase> {
    let shapes = [
        (1, 256, 6, 8),
        (8, 256, 6, 8),
        (64, 256, 6, 8),
        (300, 256, 6, 64),
        (17, 8, 2, 16),
        (0, 8, 2, 8),
        (33, 1, 1, 8),
        (129, 512, 7, 64),
    ];
    let shapes = shapes.into_iter().flat_map(|(n_rows, n_experts, top_k, rows_per_item)| {
        [false, true].map(|is_uniform| Shape { n_rows, n_experts, top_k, rows_per_item, is_uniform })
    });
    shapes
        .map(|shape| OpCase::new("route", format!("dispatch, {shape:?}"), move |device| compare(device, shape)))
        .collect()
}

fn compare(device: &Device, shape: Shape) -> Result<Deviation, CaseError> {
    let Shape { n_rows, n_experts, top_k, rows_per_item, is_uniform } = shape;
    let mut noise = Noise::new(41);
    let n_pairs = (n_rows * top_k) as usize;
    let offsets: Vec<u32> = (0..n_rows).map(|_| if is_uniform { 3 } else { noise.below(n_experts) }).collect();
    // Steps of 1 from an offset: a row's experts differ.
    let pair_expert = |pair: u32| (offsets[(pair / top_k) as usize] + pair % top_k) % n_experts;
    let experts: Vec<u32> = (0..n_pairs as u32).map(pair_expert).collect();
    let weights = noise.floats(n_pairs);
    // Padding rows of the bucket hold garbage.
    let with_padding = |values: &[u32]| [values, &[u32::MAX; 16]].concat();
    let experts_buffer = upload(device, &with_padding(&experts))?;
    let weights_buffer = upload(device, &weights)?;
    let counts = upload(device, &[StepCounts { n_rows, ..StepCounts::default() }])?;
    let most = max_items(n_rows, n_experts, top_k, rows_per_item) as usize;
    let lengths = [n_pairs, n_pairs, n_pairs, n_experts as usize + 1, 2 * most, 1];
    let buffers = lengths.map(|n| nan_buffer(device, 4 * (n + 4)));
    let mut outputs = Vec::new();
    for buffer in buffers {
        outputs.push(buffer?);
    }
    let args = DispatchArgs {
        step: Step { counts: counts.address(), ..Step::default() },
        experts: experts_buffer.address(),
        weights: weights_buffer.address(),
        row_of: outputs[0].address(),
        row_token: outputs[1].address(),
        row_weight: outputs[2].address(),
        expert_first: outputs[3].address(),
        items: outputs[4].address(),
        n_items: outputs[5].address(),
        n_experts,
        top_k,
        rows_per_item,
        pad: 0,
    };
    let want = reference(&experts, &weights, &args);
    if want.items.len() > most {
        return Err(CaseError::Rule(format!("{} items, and max_items says {most}", want.items.len())));
    }
    let mut all_want = [
        want.row_of,
        want.row_token,
        want.row_weight.iter().map(|w| w.to_bits()).collect(),
        want.expert_first,
        want.items.concat(),
        vec![want.items.len() as u32],
    ];
    let mut n_wrong = 0.0;
    for _ in 0..2 {
        launch(device, &args)?;
        for ((buffer, n), want) in outputs.iter().zip(lengths).zip(&mut all_want) {
            want.resize(n + 4, u32::MAX);
            n_wrong += Deviation::exact(&download::<u32>(device, buffer, n + 4)?, want).worst;
        }
    }
    Ok(Deviation { worst: n_wrong, limit: 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_never_more_than_their_bound() {
        assert_eq!(max_items(1, 256, 6, 8), 6);
        assert_eq!(max_items(2048, 256, 6, 64), 192 + 256);
        assert_eq!(max_items(0, 256, 6, 64), 0);
    }
}
