//! What a checkpoint's bytes are for, and how many of them one decoded token reads.

use crate::checkpoint::spec::TensorSpec;
use crate::model::cache::{CacheShape, RowFormat, is_overlapping};
use crate::model::inventory::{self, STAGE_PREFIX};
use crate::model::shape::ModelShape;

/// A part of the model, as bytes are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Subsystem {
    /// Query, key-value and output projections, sinks.
    Attention,
    /// Routed experts.
    RoutedExperts,
    /// Shared experts.
    SharedExperts,
    /// The head over the vocabulary.
    Head,
    /// Compressors of the main rows.
    Compressor,
    /// The indexer with its own compressor.
    Indexer,
    /// Hyper-connections.
    HyperConnections,
    /// Gates, their biases and hash tables.
    Router,
    /// Norms outside compressors.
    Norms,
    /// The embedding.
    Embedding,
    /// Everything of the draft stages.
    DraftStages,
}

/// Bytes of one subsystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubsystemBytes {
    /// Which one.
    pub subsystem: Subsystem,
    /// Its tensors.
    pub n_tensors: usize,
    /// Bytes in the checkpoint.
    pub stored_bytes: u64,
    /// Bytes that a step of one decoded token reads, without drafting: of routed experts the chosen ones, of tables by token
    /// one row.
    pub read_bytes: u64,
}

impl Subsystem {
    /// All of them, largest reader first (at the official shape).
    pub const ALL: [Self; 11] = [
        Self::Attention,
        Self::RoutedExperts,
        Self::SharedExperts,
        Self::Head,
        Self::Compressor,
        Self::Indexer,
        Self::HyperConnections,
        Self::Router,
        Self::Norms,
        Self::Embedding,
        Self::DraftStages,
    ];

    /// The subsystem of a tensor, by its name.
    #[must_use]
    pub fn of(name: &str) -> Self {
        let has = |part: &str| name.contains(part);
        match name {
            _ if name.starts_with(STAGE_PREFIX) => Self::DraftStages,
            "embed.weight" => Self::Embedding,
            "head.weight" => Self::Head,
            _ if has(".indexer.") => Self::Indexer,
            _ if has(".compressor.") => Self::Compressor,
            _ if has("hc_") => Self::HyperConnections,
            _ if has("norm.weight") => Self::Norms,
            _ if has(".experts.") => Self::RoutedExperts,
            _ if has(".shared_experts.") => Self::SharedExperts,
            _ if has(".gate.") => Self::Router,
            _ => Self::Attention,
        }
    }

    /// As tables show it.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Attention => "attention projections",
            Self::RoutedExperts => "routed experts",
            Self::SharedExperts => "shared experts",
            Self::Head => "head",
            Self::Compressor => "compressors",
            Self::Indexer => "indexer",
            Self::HyperConnections => "hyper-connections",
            Self::Router => "router",
            Self::Norms => "norms",
            Self::Embedding => "embedding",
            Self::DraftStages => "draft stages",
        }
    }
}

/// Sums tensors by subsystem, in the order of [`Subsystem::ALL`].
#[must_use]
pub fn by_subsystem(shape: &ModelShape, specs: &[TensorSpec]) -> Vec<SubsystemBytes> {
    let empty = |subsystem| SubsystemBytes { subsystem, n_tensors: 0, stored_bytes: 0, read_bytes: 0 };
    let mut sums: Vec<SubsystemBytes> = Subsystem::ALL.map(empty).to_vec();
    for spec in specs {
        let subsystem = Subsystem::of(&spec.name);
        for sum in sums.iter_mut().filter(|sum| sum.subsystem == subsystem) {
            sum.n_tensors += 1;
            sum.stored_bytes += spec.n_bytes() as u64;
            sum.read_bytes += read_bytes(shape, subsystem, spec);
        }
    }
    for sum in sums.iter_mut().filter(|sum| sum.subsystem == Subsystem::RoutedExperts) {
        // All experts are of one size, so the chosen ones are an exact share of the sum.
        sum.read_bytes = sum.read_bytes * shape.num_experts_per_tok as u64 / shape.n_routed_experts as u64;
    }
    sums
}

/// What the steps of a model read, whatever the lengths of its sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepBytes {
    /// Everything but routed experts, once a step; of tables the rows of one token.
    pub fixed: u64,
    /// One routed expert of one layer.
    pub expert: u64,
}

impl StepBytes {
    /// Counts.
    #[must_use]
    pub fn new(shape: &ModelShape) -> Self {
        let sums = by_subsystem(shape, &inventory::tensors(shape, false));
        let is_routed = |sum: &&SubsystemBytes| sum.subsystem == Subsystem::RoutedExperts;
        let n_experts = (shape.num_hidden_layers * shape.n_routed_experts) as u64;
        Self {
            fixed: sums.iter().filter(|sum| !is_routed(sum)).map(|sum| sum.read_bytes).sum(),
            expert: sums.iter().find(is_routed).map_or(0, |sum| sum.stored_bytes) / n_experts,
        }
    }
}

/// Bytes of the caches that a token at the end of `n_tokens` tokens reads: window rows, compressed rows, indexer keys.
#[must_use]
pub fn cache_bytes(shape: &ModelShape, format: RowFormat, n_tokens: usize) -> u64 {
    let CacheShape { ratios, dims, window, format } = CacheShape::new(shape, format);
    let of_layer = |ratio: &usize| {
        let n_groups = n_tokens.checked_div(*ratio).unwrap_or(0);
        let (n_keys, n_chosen) = if is_overlapping(*ratio) && n_groups > shape.index_topk {
            (n_groups, shape.index_topk)
        } else {
            (0, n_groups)
        };
        n_keys * format.index_row_bytes(dims) + (n_chosen + window.min(n_tokens)) * format.kv_row_bytes(dims)
    };
    ratios.iter().map(of_layer).sum::<usize>() as u64
}

fn read_bytes(shape: &ModelShape, subsystem: Subsystem, spec: &TensorSpec) -> u64 {
    let n_bytes = spec.n_bytes() as u64;
    match subsystem {
        Subsystem::DraftStages => 0,
        Subsystem::Embedding => n_bytes / shape.vocab_size as u64,
        Subsystem::Router if spec.name.ends_with(".tid2eid") => n_bytes / shape.vocab_size as u64,
        _ => n_bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::shape::OFFICIAL_CONFIG;

    #[test]
    fn official_bytes_read_for_a_decoded_token() {
        let shape = ModelShape::from_json(OFFICIAL_CONFIG.as_bytes()).unwrap();
        let sums = by_subsystem(&shape, &inventory::tensors(&shape, true));
        // Megabytes as published for this shape.
        let published = [
            (Subsystem::Attention, 4599.48),
            (Subsystem::RoutedExperts, 3449.29),
            (Subsystem::SharedExperts, 1082.20),
            (Subsystem::Head, 1059.06),
            (Subsystem::Compressor, 525.72),
            (Subsystem::Indexer, 275.35),
            (Subsystem::HyperConnections, 135.5),
            (Subsystem::Router, 90.2),
            (Subsystem::Norms, 0.7),
            (Subsystem::Embedding, 0.0),
            (Subsystem::DraftStages, 0.0),
        ];
        for (sum, (subsystem, megabytes)) in sums.iter().zip(published) {
            assert_eq!(sum.subsystem, subsystem);
            let got = sum.read_bytes as f64 / 1e6;
            assert!((got - megabytes).abs() < 0.2, "{subsystem:?}: {got} MB, published {megabytes}");
        }
        let total = sums.iter().map(|sum| sum.read_bytes).sum::<u64>() as f64 / 1e6;
        assert!((total - 11_217.0).abs() < 2.0, "{total}");
        assert_eq!(sums.iter().map(|sum| sum.stored_bytes).sum::<u64>(), 166_878_536_440);
        assert_eq!(sums[10].stored_bytes, 10_862_838_300);
        assert_eq!(sums.iter().map(|sum| sum.n_tensors).sum::<usize>(), 72_317);
    }

    #[test]
    fn a_step_reads_the_experts_it_chose_and_the_caches_of_its_tokens() {
        let shape = ModelShape::from_json(OFFICIAL_CONFIG.as_bytes()).unwrap();
        let bytes = StepBytes::new(&shape);
        assert_eq!(bytes.expert, 3 * (4096 * 2048 / 2 + 4096 * 2048 / 32));
        let read: u64 = by_subsystem(&shape, &inventory::tensors(&shape, true)).iter().map(|sum| sum.read_bytes).sum();
        assert_eq!(bytes.fixed + 43 * 6 * bytes.expert, read);
        // By hand: 43 windows, then 512 groups of 4 in 21 layers that need no choice, 16 of 128 in 20 layers.
        let at = |n_tokens| cache_bytes(&shape, RowFormat::Device, n_tokens);
        assert_eq!(at(100), 584 * (43 * 100 + 21 * 25));
        assert_eq!(at(2048), 584 * (43 * 128 + 21 * 512 + 20 * 16));
        assert_eq!(at(4096), 584 * (43 * 128 + 21 * 512 + 20 * 32) + 68 * 21 * 1024);
    }
}
