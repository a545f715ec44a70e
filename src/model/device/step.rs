//! One step as kernels read it: rows, runs, block tables and counts, uploaded in one go into a buffer that stays.

use crate::device::{Buffer, Device, DeviceError};
use crate::ids::TokenId;
use crate::model::batch::{Batch, Capacity, Run, TokenSource};
use crate::model::cache::BLOCK_TOKENS;
use crate::model::device::workspace::{LOGIT_TILE, OVERLAPPING, SCORE_TILE};
use crate::ops::step::{Step, StepCounts, StepRow, StepRun, TOKEN_OF_SLOT};

/// Rows up to which a step runs as a recorded graph: those of one tile of scores and of one tile of logits.
const GRAPH_ROWS: usize = 64;

const _: () = assert!(GRAPH_ROWS <= SCORE_TILE && GRAPH_ROWS <= LOGIT_TILE);

/// The parts of the buffer begin at multiples of this.
const ALIGN_BYTES: usize = 256;

/// The buffer, and its image on the host.
#[derive(Debug)]
pub(super) struct Staging {
    buffer: Buffer,
    image: Vec<u8>,
    places: Places,
    /// Groups that a row attends to without choosing.
    top_k: u32,
    /// Tokens of a sequence at most.
    max_tokens: usize,
}

/// Where the parts begin.
#[derive(Clone, Copy, Debug, Default)]
struct Places {
    counts: usize,     // [1 + n_tiles] StepCounts: the step's, then one with the rows of each tile of logits
    rows: usize,       // [T] StepRow
    runs: usize,       // [n_slots] StepRun
    logit_rows: usize, // [T] u32
    block_ids: usize,  // [n_slots * blocks of the longest sequence] u32
    end: usize,
}

/// A step on the device.
#[derive(Clone, Debug)]
pub(super) struct StagedStep {
    pub step: Step,
    /// Rows (T).
    pub n_rows: usize,
    /// Tokens up to any row's position, itself included; a recorded step's are those of its shape.
    pub max_tokens: usize,
    /// Rows among which some see more compressed rows than they may attend to.
    pub score_tiles: Vec<ScoreTile>,
    /// Rows whose logits are wanted, some at a time.
    pub logit_tiles: Vec<LogitTile>,
}

/// At most [`SCORE_TILE`] rows whose groups are scored together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScoreTile {
    pub first_row: u32,
    pub n_rows: u32,
    /// The most groups that one of them sees.
    pub max_groups: u32,
}

/// What the launches of a small step depend on beside what they read on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GraphShape {
    n_rows: usize,
    /// 0: no row chooses.
    max_groups: u32,
}

/// At most [`LOGIT_TILE`] rows whose logits are wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogitTile {
    /// The step, with the number of these rows as its number of logit rows.
    pub step: Step,
    /// The rows.
    pub rows: u64, // [n_rows] u32
    pub n_rows: usize,
}

impl Places {
    fn new(capacity: &Capacity) -> Self {
        let mut end = 0;
        let mut take = |n: usize, n_bytes: usize| {
            let at = end;
            end = (at + n * n_bytes).next_multiple_of(ALIGN_BYTES);
            at
        };
        let n_tiles = capacity.max_rows.div_ceil(LOGIT_TILE);
        let n_block_ids = capacity.n_slots * capacity.max_tokens.div_ceil(BLOCK_TOKENS);
        let places = Self {
            counts: take(1 + n_tiles, size_of::<StepCounts>()),
            rows: take(capacity.max_rows, size_of::<StepRow>()),
            runs: take(capacity.n_slots, size_of::<StepRun>()),
            logit_rows: take(capacity.max_rows, 4),
            block_ids: take(n_block_ids, 4),
            end: 0,
        };
        Self { end, ..places }
    }
}

impl Staging {
    /// Bytes of the buffer.
    pub fn n_bytes(capacity: &Capacity) -> usize {
        Places::new(capacity).end
    }

    /// Allocates the buffer of an executor. A row attends to `top_k` groups at most.
    ///
    /// # Errors
    /// When the device has not enough memory.
    pub fn new(device: &Device, capacity: &Capacity, top_k: usize) -> Result<Self, DeviceError> {
        let places = Places::new(capacity);
        Ok(Self {
            buffer: device.alloc(places.end)?,
            image: vec![0; places.end],
            places,
            top_k: top_k as u32,
            max_tokens: capacity.max_tokens,
        })
    }

    /// Uploads a checked batch. `token_ids` and `bad_runs` are those of [`crate::model::slots::RowTokens`].
    ///
    /// # Errors
    /// When the device is lost.
    pub fn stage(
        &mut self,
        device: &Device,
        batch: &Batch,
        token_ids: &[TokenId], // [T]
        bad_runs: &[bool],
    ) -> Result<StagedStep, DeviceError> {
        let places = self.places;
        let (mut rows, mut runs, mut block_ids) = (Vec::new(), Vec::new(), Vec::<u32>::new());
        let mut logit_rows = Vec::<u32>::new();
        for ((run_idx, run), is_bad) in (0..).zip(&batch.runs).zip(bad_runs) {
            let n_blocks = (run.first_pos + run.n_rows).div_ceil(BLOCK_TOKENS);
            let first_row = rows.len();
            runs.push(step_run(run, first_row, block_ids.len(), n_blocks));
            block_ids.extend(batch.block_ids[run.blocks.clone()].iter().take(n_blocks).map(|block| block.0));
            logit_rows.extend(run.logit_rows.clone().map(|row| (first_row + row) as u32));
            let is_of_slot = run.tokens == TokenSource::Slot && !is_bad;
            rows.extend((0..run.n_rows).map(|i| StepRow {
                token_id: if is_of_slot && i == 0 { TOKEN_OF_SLOT } else { token_ids[first_row + i].0 },
                position: (run.first_pos + i) as u32,
                run: run_idx,
                slot: run.slot.0,
            }));
        }
        let counts = |n_logit_rows: usize| StepCounts {
            n_rows: rows.len() as u32,
            n_runs: runs.len() as u32,
            n_logit_rows: n_logit_rows as u32,
            pad: 0,
        };
        // A recorded graph looks at the first tile, also where it is empty.
        let n_tiles = logit_rows.len().div_ceil(LOGIT_TILE).max(1);
        let in_tile = |tile: usize| (logit_rows.len() - tile * LOGIT_TILE).min(LOGIT_TILE);
        let all_counts: Vec<StepCounts> =
            std::iter::once(logit_rows.len()).chain((0..n_tiles).map(in_tile)).map(counts).collect();
        self.put(places.counts, bytemuck::cast_slice(&all_counts));
        self.put(places.rows, bytemuck::cast_slice(&rows));
        self.put(places.runs, bytemuck::cast_slice(&runs));
        self.put(places.logit_rows, bytemuck::cast_slice(&logit_rows));
        self.put(places.block_ids, bytemuck::cast_slice(&block_ids));
        device.upload(&self.buffer, 0, &self.image[..places.block_ids + 4 * block_ids.len()])?;
        Ok(StagedStep {
            step: self.view(0),
            n_rows: rows.len(),
            max_tokens: rows.iter().map(|row| row.position as usize + 1).max().unwrap_or(0),
            score_tiles: self.score_tiles(&rows),
            logit_tiles: self.logit_tiles(logit_rows.len()),
        })
    }

    fn score_tiles(&self, rows: &[StepRow]) -> Vec<ScoreTile> {
        let tile = |(tile, rows): (u32, &[StepRow])| ScoreTile {
            first_row: tile * SCORE_TILE as u32,
            n_rows: rows.len() as u32,
            max_groups: rows.iter().map(|row| (row.position + 1) / OVERLAPPING as u32).max().unwrap_or(0),
        };
        (0..).zip(rows.chunks(SCORE_TILE)).map(tile).filter(|tile| tile.max_groups > self.top_k).collect()
    }

    fn logit_tiles(&self, n_logit_rows: usize) -> Vec<LogitTile> {
        let tile = |first: usize| LogitTile {
            step: self.view(1 + first / LOGIT_TILE),
            rows: self.buffer.address() + (self.places.logit_rows + 4 * first) as u64,
            n_rows: LOGIT_TILE.min(n_logit_rows - first),
        };
        (0..n_logit_rows).step_by(LOGIT_TILE).map(tile).collect()
    }

    /// The step's addresses, with one of the counts.
    fn view(&self, counts_idx: usize) -> Step {
        let at = |offset: usize| self.buffer.address() + offset as u64;
        Step {
            rows: at(self.places.rows),
            runs: at(self.places.runs),
            block_ids: at(self.places.block_ids),
            counts: at(self.places.counts + counts_idx * size_of::<StepCounts>()),
        }
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) {
        self.image[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

impl StagedStep {
    /// The shape of the graph that runs this step: rows and groups rounded up to powers of two. `None`: it has too many rows.
    pub fn graph_shape(&self) -> Option<GraphShape> {
        let max_groups = self.score_tiles.first().map_or(0, |tile| tile.max_groups.next_power_of_two());
        let n_rows = self.n_rows.next_power_of_two();
        (self.n_rows <= GRAPH_ROWS).then_some(GraphShape { n_rows, max_groups })
    }

    /// The step as a graph of that shape runs it: grids are the shape's, all else is read on the device.
    pub fn recorded(&self, staging: &Staging, shape: GraphShape) -> Self {
        let GraphShape { n_rows, max_groups } = shape;
        let tile = ScoreTile { first_row: 0, n_rows: n_rows as u32, max_groups };
        // Rows see at most so many complete groups, and the tokens of one that is not.
        let max_tokens = (max_groups.max(staging.top_k) as usize + 1) * OVERLAPPING - 1;
        Self {
            step: self.step,
            n_rows,
            max_tokens: max_tokens.min(staging.max_tokens),
            score_tiles: if max_groups == 0 { Vec::new() } else { vec![tile] },
            logit_tiles: staging.logit_tiles(n_rows),
        }
    }
}

fn step_run(run: &Run, first_row: usize, first_block: usize, n_blocks: usize) -> StepRun {
    StepRun {
        slot: run.slot.0,
        first_pos: run.first_pos as u32,
        first_row: first_row as u32,
        n_rows: run.n_rows as u32,
        first_block: first_block as u32,
        n_blocks: n_blocks as u32,
        pad: [0; 2],
    }
}
