//! What a checkpoint's bytes are for, and how many of them one decoded token reads.

use crate::checkpoint::spec::TensorSpec;
use crate::model::inventory::STAGE_PREFIX;
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
    use crate::model::inventory;

    #[test]
    fn official_bytes_read_for_a_decoded_token() {
        let shape = ModelShape::from_json(include_bytes!("../../tests/fixtures/official/config.json")).unwrap();
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
}
