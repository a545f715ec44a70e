//! How much fits: from the model's shape, the settings and the free memory to numbers of blocks, slots and checkpoints.

use crate::config::{ConfigError, EngineConfig};
use crate::kv::layout::{Budget, DEFAULT_CHECKPOINT_PERMILLE, Layout, StateBytes};
use crate::model::batch::Capacity;
use crate::model::cache::{BLOCK_TOKENS, CacheLayout};
use crate::model::device::DeviceLayout;
use crate::model::runner::RunnerPlaces;

/// The part of the machine's available memory that the KV cache takes unless it is told otherwise.
pub const HOST_SHARE: u64 = 4;

/// What fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// Blocks, slots and checkpoints.
    pub layout: Layout,
    /// Longest prompt plus output.
    pub max_model_len: usize,
}

/// What the places depend on beside the settings.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Bytes of the caches' parts.
    pub bytes: StateBytes,
    /// Longest sequence that the model was made for.
    pub max_position_embeddings: usize,
    /// Memory that is free once the weights are there; `None`: unknown.
    pub free_bytes: Option<u64>,
    /// The part of it, as a divisor, that the KV cache takes unless it is told otherwise.
    pub share: u64,
}

impl Places {
    /// Settles the sizes. A context length that was asked for must fit; the model's own is cut to what the memory holds.
    ///
    /// # Errors
    /// When the memory or the context asked for is too small or too large, with the numbers.
    pub fn plan(engine: &EngineConfig, room: Room) -> Result<Self, ConfigError> {
        let model_max = room.max_position_embeddings;
        if let Some(len) = engine.max_model_len.filter(|len| *len > model_max) {
            let range = format!("at most {model_max}, the model's max_position_embeddings");
            return Err(ConfigError::OutOfRange { flag: "max-model-len", range, value: len.to_string() });
        }
        let wanted = engine.max_model_len.unwrap_or(model_max);
        let bytes = room.bytes;
        let total_bytes = engine.kv_cache_bytes.unwrap_or_else(|| default_bytes(engine, wanted, &room));
        // Blocks beyond those that every slot can fill serve the prefix cache alone.
        let max_blocks = (2 * engine.max_num_seqs).saturating_mul(n_blocks(wanted));
        let budget = Budget {
            total_bytes,
            n_slots: engine.max_num_seqs,
            checkpoint_permille: if engine.enable_prefix_caching { DEFAULT_CHECKPOINT_PERMILLE } else { 0 },
            max_blocks: u32::try_from(max_blocks).unwrap_or(u32::MAX),
        };
        let layout = Layout::plan(budget, bytes).map_err(|error| ConfigError::OutOfRange {
            flag: "kv-cache-memory-bytes",
            range: format!("at least {} for {} sequences (--max-num-seqs)", error.needed_bytes, error.n_slots),
            value: total_bytes.to_string(),
        })?;
        let fits = layout.n_tokens();
        if let Some(len) = engine.max_model_len.filter(|len| *len > fits) {
            let range =
                format!("at most {fits}, which is what {total_bytes} bytes of KV cache (--kv-cache-memory-bytes) hold");
            return Err(ConfigError::OutOfRange { flag: "max-model-len", range, value: len.to_string() });
        }
        Ok(Self { layout, max_model_len: wanted.min(fits) })
    }

    /// The places as the executor will have them.
    #[must_use]
    pub const fn capacity(&self, engine: &EngineConfig, vocab_size: usize) -> Capacity {
        Capacity {
            n_slots: self.layout.n_slots,
            n_blocks: self.layout.n_blocks as usize,
            n_checkpoints: self.layout.n_checkpoints as usize,
            max_rows: engine.max_num_batched_tokens,
            max_tokens: self.max_model_len,
            vocab_size,
        }
    }

    /// The places for a runner, which makes the same numbers of them.
    #[must_use]
    pub fn for_runner(&self, engine: &EngineConfig, bytes: StateBytes) -> RunnerPlaces {
        let layout = &self.layout;
        let kv_bytes =
            u64::from(layout.n_blocks) * bytes.block_bytes + u64::from(layout.n_checkpoints) * bytes.checkpoint_bytes;
        RunnerPlaces {
            n_slots: layout.n_slots,
            kv_bytes: usize::try_from(kv_bytes).unwrap_or(usize::MAX),
            n_checkpoints: layout.n_checkpoints as usize,
            max_rows: engine.max_num_batched_tokens,
            max_tokens: self.max_model_len,
        }
    }
}

/// Bytes of the parts of the CPU's caches.
#[must_use]
pub fn host_bytes(caches: &CacheLayout) -> StateBytes {
    StateBytes {
        // A model without compression keeps nothing in blocks, but they are still counted.
        block_bytes: caches.block_bytes().max(1) as u64,
        slot_bytes: caches.slot_bytes() as u64,
        checkpoint_bytes: caches.max_checkpoint_bytes() as u64,
    }
}

/// Bytes of the parts of a device's caches.
#[must_use]
pub fn device_bytes(caches: &DeviceLayout) -> StateBytes {
    StateBytes {
        block_bytes: caches.rows().block_bytes().max(1) as u64,
        slot_bytes: caches.slot_bytes() as u64,
        checkpoint_bytes: caches.checkpoint_bytes() as u64,
    }
}

fn n_blocks(n_tokens: usize) -> usize {
    n_tokens.div_ceil(BLOCK_TOKENS)
}

/// Enough for every slot at full length, but no more than a part of the free memory; at least one sequence at full length.
fn default_bytes(engine: &EngineConfig, max_model_len: usize, room: &Room) -> u64 {
    let (bytes, free_bytes) = (room.bytes, room.free_bytes);
    let sequence_bytes = n_blocks(max_model_len) as u64 * bytes.block_bytes;
    let with_checkpoints = |blocks_bytes: u64| blocks_bytes + blocks_bytes / 4 + 2 * bytes.checkpoint_bytes;
    let slots_bytes = engine.max_num_seqs as u64 * bytes.slot_bytes;
    let least = slots_bytes + with_checkpoints(sequence_bytes);
    let most = slots_bytes + with_checkpoints(engine.max_num_seqs as u64 * sequence_bytes);
    let share = free_bytes.map_or(least, |free| free / room.share);
    // More than is free would be killed later: then the context is cut instead.
    let least = free_bytes.map_or(least, |free| least.min(free / 2));
    share.clamp(least, most.max(least))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::config::args::Settings;
    use crate::model::cache::{CacheShape, RowFormat};
    use crate::model::shape::ModelShape;

    fn caches() -> (CacheLayout, usize) {
        let dir = crate::config::model::find("demo").unwrap();
        let shape = ModelShape::from_json(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
        (CacheLayout::new(CacheShape::new(&shape, RowFormat::Kvq)), shape.max_position_embeddings)
    }

    fn plan(change: impl FnOnce(&mut EngineConfig), free_bytes: Option<u64>) -> Result<Places, ConfigError> {
        let mut engine = Config::from_settings(Settings::default()).unwrap().engine;
        change(&mut engine);
        let (caches, max_position_embeddings) = caches();
        Places::plan(
            &engine,
            Room { bytes: host_bytes(&caches), max_position_embeddings, free_bytes, share: HOST_SHARE },
        )
    }

    #[test]
    fn the_defaults_hold_the_models_context() {
        for free_bytes in [None, Some(2 << 30), Some(24 << 30), Some(1 << 40)] {
            let places = plan(|_| {}, free_bytes).unwrap();
            assert_eq!(places.max_model_len, 65_536, "{free_bytes:?}");
            assert!(places.layout.n_tokens() >= 65_536 && places.layout.n_checkpoints > 0, "{places:?}");
            assert!(free_bytes.is_none_or(|free| places.layout.used_bytes <= free / 2), "{places:?}");
        }
    }

    #[test]
    fn little_memory_cuts_the_models_context_but_not_one_that_was_asked_for() {
        let (caches, _) = caches();
        let tight = caches.slot_bytes() as u64 * 4 + caches.block_bytes() as u64 * 40;
        let small = |engine: &mut EngineConfig| {
            engine.max_num_seqs = 4;
            engine.kv_cache_bytes = Some(tight);
        };
        let places = plan(small, None).unwrap();
        assert!(places.max_model_len < 65_536 && places.max_model_len == places.layout.n_tokens());
        let error = plan(
            |engine| {
                small(engine);
                engine.max_model_len = Some(60_000)
            },
            None,
        )
        .unwrap_err()
        .to_string();
        assert!(error.contains("--max-model-len") && error.contains("60000"), "{error}");
    }

    #[test]
    fn limits_are_named() {
        let error = plan(|engine| engine.max_model_len = Some(65_537), None).unwrap_err().to_string();
        assert!(error.contains("65536") && error.contains("65537"), "{error}");
        let error = plan(|engine| engine.kv_cache_bytes = Some(1000), None).unwrap_err().to_string();
        assert!(error.starts_with("--kv-cache-memory-bytes") && error.contains("1000"), "{error}");
    }

    #[test]
    fn without_prefix_caching_there_are_no_checkpoints() {
        let places = plan(|engine| engine.enable_prefix_caching = false, None).unwrap();
        assert_eq!(places.layout.n_checkpoints, 0);
    }
}
