//! A forward pass and its caches for tests: sequences are fed in runs of any kind, and logits come back by row.
#![allow(dead_code, clippy::unwrap_used, clippy::panic)] // Each test target uses its own part; a failed step of a test is a panic.

pub mod golden;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use flashd::checkpoint::Checkpoint;
use flashd::checkpoint::synth::{self, SynthPlan};
use flashd::device::cpu::{Cpu, SimdLevel};
use flashd::ids::{BlockId, CheckpointId, SlotIdx, TokenId};
use flashd::model::batch::{Batch, RowKind, Run, TokenSource};
use flashd::model::cache::{BLOCK_TOKENS, Cache, CacheLayout, CachePlaces, CacheShape};
use flashd::model::forward::{Forward, Rounding, Trace};
use flashd::model::inventory;
use flashd::model::shape::ModelShape;
use flashd::model::weights::Weights;

/// A bound checkpoint.
#[derive(Clone)]
pub struct Model {
    pub shape: ModelShape,
    pub weights: Arc<Weights>,
}

/// A forward pass with caches.
pub struct Lab {
    pub forward: Forward,
    pub cache: Cache,
    pub vocab_size: usize,
    next_block: u32,
}

/// A sequence: its slot, its block table and the number of tokens fed so far.
#[derive(Clone)]
pub struct Sequence {
    pub slot: SlotIdx,
    pub blocks: Vec<BlockId>,
    pub n_tokens: usize,
}

/// A part of a step: the next tokens of a sequence.
pub struct Feed<'a> {
    pub sequence: &'a mut Sequence,
    pub tokens: &'a [TokenId],
    pub kind: RowKind,
    pub logit_rows: Range<usize>,
}

impl Model {
    /// Opens and binds a checkpoint.
    pub fn open(dir: &Path) -> Self {
        let checkpoint = Checkpoint::open(dir).unwrap();
        let shape = ModelShape::from_json(checkpoint.config_json()).unwrap();
        let weights = Arc::new(Weights::bind(&checkpoint, &shape).unwrap());
        Self { shape, weights }
    }

    /// Makes the checkpoint of a fixture. The files may go once they are mapped.
    pub fn synthetic(name: &str, seed: u64) -> Self {
        let config_json = std::fs::read(fixture(name, "config.json")).unwrap();
        let shape = ModelShape::from_json(&config_json).unwrap();
        let shards = inventory::shards(&shape);
        let plan = SynthPlan {
            config_json: &config_json,
            shards: &shards,
            seed,
            n_experts: shape.n_routed_experts,
            is_sparse: false,
        };
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join(name);
        synth::write(&out, &plan, &|_| ()).unwrap();
        Self::open(&out)
    }

    /// A forward pass on the best level and all threads.
    pub fn lab(&self, rounding: Rounding) -> Lab {
        self.lab_on(rounding, Cpu::detect().unwrap())
    }

    /// A forward pass on a chosen level and number of threads.
    pub fn lab_with(&self, rounding: Rounding, level: SimdLevel, n_threads: usize) -> Lab {
        self.lab_on(rounding, Cpu::with_level(level, n_threads).unwrap())
    }

    fn lab_on(&self, rounding: Rounding, cpu: Cpu) -> Lab {
        let layout = CacheLayout::new(CacheShape::new(&self.shape, rounding.row_format()));
        let places = CachePlaces { n_blocks: 128, n_slots: 16, n_checkpoints: 4 };
        Lab {
            forward: Forward::new(Arc::clone(&self.weights), self.shape.clone(), rounding, cpu),
            cache: Cache::new(layout, places),
            vocab_size: self.shape.vocab_size,
            next_block: 0,
        }
    }
}

impl Lab {
    /// An empty sequence in a slot, with blocks of its own. Blocks are handed out anew for slot 0, so a test of one sequence
    /// can start as many as it likes; what they held before must not matter.
    pub fn start(&mut self, slot: u32, max_tokens: usize) -> Sequence {
        if slot == 0 {
            self.next_block = 0;
        }
        let first = self.next_block;
        self.next_block += max_tokens.div_ceil(BLOCK_TOKENS) as u32;
        // Descending ids: a table that is taken for consecutive blocks shows.
        Sequence { slot: SlotIdx(slot), blocks: (first..self.next_block).rev().map(BlockId).collect(), n_tokens: 0 }
    }

    /// One step.
    pub fn step(&mut self, feeds: &mut [Feed<'_>]) {
        self.step_traced(feeds, None);
    }

    /// One step, with a look inside.
    pub fn step_traced(&mut self, feeds: &mut [Feed<'_>], trace: Option<Trace<'_>>) {
        let mut batch = Batch::default();
        for feed in feeds.iter_mut() {
            let (start, first_block) = (batch.token_ids.len(), batch.block_ids.len());
            batch.token_ids.extend_from_slice(feed.tokens);
            batch.block_ids.extend_from_slice(&feed.sequence.blocks);
            batch.runs.push(Run {
                slot: feed.sequence.slot,
                first_pos: feed.sequence.n_tokens,
                n_rows: feed.tokens.len(),
                kind: feed.kind,
                tokens: TokenSource::Host { start },
                blocks: first_block..batch.block_ids.len(),
                logit_rows: feed.logit_rows.clone(),
            });
            feed.sequence.n_tokens += feed.tokens.len();
        }
        let token_ids = batch.token_ids.clone();
        self.forward.run_traced(&batch, &token_ids, &mut self.cache, trace);
    }

    /// Feeds a prompt in chunks and returns the logits after its last token.
    pub fn prefill(&mut self, sequence: &mut Sequence, tokens: &[TokenId], chunk: usize) -> Vec<f32> {
        let mut logits = Vec::new();
        for tokens in tokens.chunks(chunk.max(1)) {
            logits = self.feed(sequence, tokens, RowKind::Prefill, tokens.len() - 1..tokens.len());
        }
        logits
    }

    /// Feeds one token and returns its logits.
    pub fn decode(&mut self, sequence: &mut Sequence, token: TokenId) -> Vec<f32> {
        self.feed(sequence, &[token], RowKind::Decode, 0..1)
    }

    /// Feeds one run alone and returns the logits of its wanted rows.
    pub fn feed(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[TokenId],
        kind: RowKind,
        logit_rows: Range<usize>,
    ) -> Vec<f32> {
        self.step(&mut [Feed { sequence, tokens, kind, logit_rows: logit_rows.clone() }]);
        logit_rows.flat_map(|row| self.forward.logits(0, row).to_vec()).collect()
    }

    /// Saves a sequence's window state.
    pub fn save(&mut self, sequence: &Sequence, checkpoint: u32) {
        self.cache.save(sequence.slot, CheckpointId(checkpoint), sequence.n_tokens);
    }

    /// A sequence in another slot that goes on from a checkpoint and shares the blocks.
    pub fn resume(&mut self, of: &Sequence, checkpoint: u32, slot: u32) -> Sequence {
        let n_tokens = self.cache.restore(CheckpointId(checkpoint), SlotIdx(slot));
        Sequence { slot: SlotIdx(slot), blocks: of.blocks.clone(), n_tokens }
    }
}

/// A file of a fixture.
pub fn fixture(name: &str, file: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name).join(file)
}

/// The most likely token, the lowest of equals.
pub fn argmax(logits: &[f32]) -> TokenId {
    let mut best = 0;
    for (i, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = i;
        }
    }
    TokenId(best as u32)
}

/// Panics at the first logit whose bits differ.
pub fn assert_same_bits(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(got.to_bits() == want.to_bits(), "{what}: logit {i} is {got}, want {want}");
    }
}
