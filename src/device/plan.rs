//! The plan of device memory, made before anything is loaded: what does not fit is refused with the sums.

use super::Memory;

/// Memory that stays free on a large device: runtimes take some for graphs, code and printf buffers after the plan is made.
const LARGEST_MARGIN_BYTES: u64 = 2 << 30;

/// Memory that stays free on the smallest.
const SMALLEST_MARGIN_BYTES: u64 = 64 << 20;

/// What share of a device stays free between the two.
const MARGIN_SHARE: u64 = 64;

/// What the KV cache gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvRequest {
    /// As many bytes as the operator says (`--kv-cache-memory-bytes`).
    Exactly(u64),
    /// All that is left, up to `most_bytes`, and at least enough for one sequence.
    Rest {
        /// Fewest bytes with which the server can serve.
        least_bytes: u64,
        /// Bytes beyond which nothing is gained.
        most_bytes: u64,
    },
}

/// Bytes that the model needs on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Weights as the kernels read them, with their padding.
    pub weights_bytes: u64,
    /// Window state of every slot and checkpoint, step metadata.
    pub state_bytes: u64,
    /// The largest step's intermediate values.
    pub workspace_bytes: u64,
    /// Recorded graphs and loaded code.
    pub graphs_bytes: u64,
    /// The KV cache.
    pub kv: KvRequest,
}

/// A plan that fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// What it was made for.
    pub needs: Needs,
    /// Bytes of the KV cache.
    pub kv_bytes: u64,
    /// Bytes that stay free.
    pub spare_bytes: u64,
}

/// A plan that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the device's memory does not suffice: weights {} + state {} + workspace {} + graphs {} + KV cache {} + margin {} = {}, \
     but {} of {} are free; {advice}",
    gib(needs.weights_bytes), gib(needs.state_bytes), gib(needs.workspace_bytes), gib(needs.graphs_bytes), gib(*kv_bytes),
    gib(*margin_bytes), gib(*sum_bytes), gib(memory.free_bytes), gib(memory.total_bytes)
)]
pub struct PlanError {
    /// What was to fit.
    pub needs: Needs,
    /// Bytes of the KV cache in the sum.
    pub kv_bytes: u64,
    /// Bytes that were to stay free.
    pub margin_bytes: u64,
    /// All together.
    pub sum_bytes: u64,
    /// What the device has.
    pub memory: Memory,
    /// What to do.
    pub advice: String,
}

impl MemoryPlan {
    /// Plans a device's memory. Free memory is what counts: other processes, and desktops, use some.
    ///
    /// # Errors
    /// [`PlanError`] with the sums and what would make them smaller.
    pub fn new(needs: Needs, memory: Memory) -> Result<Self, PlanError> {
        let margin_bytes = margin_bytes(memory.total_bytes);
        let fixed = [needs.weights_bytes, needs.state_bytes, needs.workspace_bytes, needs.graphs_bytes, margin_bytes];
        let fixed_bytes = fixed.iter().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
        let left_bytes = memory.free_bytes.saturating_sub(fixed_bytes);
        let kv_bytes = match needs.kv {
            KvRequest::Exactly(bytes) => bytes,
            KvRequest::Rest { least_bytes, most_bytes } => left_bytes.min(most_bytes).max(least_bytes),
        };
        let sum_bytes = fixed_bytes.saturating_add(kv_bytes);
        if sum_bytes <= memory.free_bytes {
            let spare_bytes = memory.free_bytes - sum_bytes + margin_bytes;
            return Ok(Self { needs, kv_bytes, spare_bytes });
        }
        let over_bytes = sum_bytes - memory.free_bytes;
        let advice = advice(&needs, memory, kv_bytes, over_bytes);
        Err(PlanError { needs, kv_bytes, margin_bytes, sum_bytes, memory, advice })
    }
}

/// Bytes that stay free on a device.
#[must_use]
pub fn margin_bytes(total_bytes: u64) -> u64 {
    (total_bytes / MARGIN_SHARE).clamp(SMALLEST_MARGIN_BYTES, LARGEST_MARGIN_BYTES)
}

/// The one change that would help most, and by how much.
fn advice(needs: &Needs, memory: Memory, kv_bytes: u64, over_bytes: u64) -> String {
    let used_bytes = memory.total_bytes.saturating_sub(memory.free_bytes);
    if needs.weights_bytes > memory.total_bytes {
        return "the weights alone are larger than the device".to_owned();
    }
    let asked = matches!(needs.kv, KvRequest::Exactly(_));
    if asked && kv_bytes > over_bytes {
        return format!("lower --kv-cache-memory-bytes to {} bytes or less", kv_bytes - over_bytes);
    }
    if used_bytes >= over_bytes {
        return format!("end the processes that use {} of it", gib(used_bytes));
    }
    if needs.workspace_bytes > over_bytes {
        let share = needs.workspace_bytes - over_bytes;
        let percent = share.saturating_mul(100) / needs.workspace_bytes;
        return format!("lower --max-num-batched-tokens to {percent} % of what it is or less");
    }
    if needs.state_bytes > over_bytes {
        return "lower --max-num-seqs".to_owned();
    }
    "use a device with more memory".to_owned()
}

fn gib(bytes: u64) -> String {
    let bytes = bytes as f64;
    if bytes >= (1 << 30) as f64 {
        return format!("{:.2} GiB", bytes / (1 << 30) as f64);
    }
    format!("{:.1} MiB", bytes / (1 << 20) as f64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;

    /// An MI300X with the whole checkpoint.
    fn needs(kv: KvRequest) -> Needs {
        Needs { weights_bytes: 156 * GIB, state_bytes: GIB, workspace_bytes: 4 * GIB, graphs_bytes: GIB / 2, kv }
    }

    const FREE: Memory = Memory { free_bytes: 191 * GIB, total_bytes: 192 * GIB };

    #[test]
    fn a_pool_that_leaves_less_than_the_margin_is_refused_with_the_sums() {
        let error = MemoryPlan::new(needs(KvRequest::Exactly(30 * GIB)), FREE).unwrap_err();
        let text = error.to_string();
        for part in
            ["weights 156.00 GiB", "KV cache 30.00 GiB", "margin 2.00 GiB", "= 193.50 GiB", "191.00 GiB of 192.00"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        let fits = 30 * GIB - (193 * GIB + GIB / 2 - 191 * GIB);
        assert!(text.contains(&format!("--kv-cache-memory-bytes to {fits} bytes")), "{text}");
        let plan = MemoryPlan::new(needs(KvRequest::Exactly(fits)), FREE).unwrap();
        assert_eq!(plan.spare_bytes, 2 * GIB);
    }

    #[test]
    fn the_rest_goes_to_the_cache_between_its_bounds() {
        let rest = |least: u64, most: u64| {
            MemoryPlan::new(needs(KvRequest::Rest { least_bytes: least, most_bytes: most }), FREE)
        };
        assert_eq!(rest(GIB, u64::MAX).unwrap().kv_bytes, 191 * GIB - (163 * GIB + GIB / 2));
        assert_eq!(rest(GIB, 20 * GIB).unwrap().kv_bytes, 20 * GIB);
        assert!(rest(28 * GIB, u64::MAX).is_err());
    }

    #[test]
    fn advice_names_what_would_help() {
        let small = Memory { free_bytes: 100 * GIB, total_bytes: 100 * GIB };
        let text = MemoryPlan::new(needs(KvRequest::Exactly(GIB)), small).unwrap_err().to_string();
        assert!(text.contains("weights alone"), "{text}");
        let busy = Memory { free_bytes: 150 * GIB, total_bytes: 192 * GIB };
        let rest = KvRequest::Rest { least_bytes: GIB, most_bytes: 20 * GIB };
        let text = MemoryPlan::new(needs(rest), busy).unwrap_err().to_string();
        assert!(text.contains("processes that use 42.00 GiB"), "{text}");
        let tight = Memory { free_bytes: 162 * GIB, total_bytes: 162 * GIB };
        let text = MemoryPlan::new(needs(rest), tight).unwrap_err().to_string();
        assert!(text.contains("--max-num-batched-tokens"), "{text}");
    }

    proptest! {
        #[test]
        fn a_plan_never_takes_more_than_is_free(
            parts in proptest::array::uniform4(0_u64..1 << 40),
            kv in 0_u64..1 << 40,
            least in 0_u64..1 << 30,
            rest in any::<bool>(),
            total in 0_u64..1 << 42,
            used in 0_u64..1 << 40,
        ) {
            let kv = if rest { KvRequest::Rest { least_bytes: least, most_bytes: kv.max(least) } } else { KvRequest::Exactly(kv) };
            let [weights_bytes, state_bytes, workspace_bytes, graphs_bytes] = parts;
            let needs = Needs { weights_bytes, state_bytes, workspace_bytes, graphs_bytes, kv };
            let memory = Memory { free_bytes: total.saturating_sub(used), total_bytes: total };
            match MemoryPlan::new(needs, memory) {
                Ok(plan) => {
                    let taken = parts.iter().sum::<u64>() + plan.kv_bytes;
                    prop_assert_eq!(taken + plan.spare_bytes, memory.free_bytes);
                    prop_assert!(plan.spare_bytes >= margin_bytes(total));
                }
                Err(error) => {
                    prop_assert!(error.sum_bytes > memory.free_bytes);
                    prop_assert!(!error.advice.is_empty());
                }
            }
        }
    }
}
