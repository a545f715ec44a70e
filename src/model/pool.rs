//! The compressed rows that the queries of a step attend to, decoded from the caches into f32.

use crate::ids::LayerIdx;
use crate::model::cache::Cache;
use crate::model::forward::{Step, fit};
use crate::model::indexer::IndexerScratch;

/// Cached rows that a thread decodes at a time.
const DECODE_TILE: usize = 16;

/// Which compressed rows a query attends to, ascending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Visible<'a> {
    /// The first n.
    All(usize),
    /// These.
    Chosen(&'a [u32]),
}

/// Decoded rows and, for each query, where its own are.
#[derive(Debug, Default)]
pub(super) struct Pool {
    rows: Vec<f32>,               // [n, DH] f32
    entries: Vec<(usize, usize)>, // [n] (run, group)
    indices: Vec<u32>,            // the queries' rows, one query after the other
    first_index: Vec<usize>,      // [T + 1]
}

impl Visible<'_> {
    const fn len(self) -> usize {
        match self {
            Self::All(n) => n,
            Self::Chosen(rows) => rows.len(),
        }
    }
}

impl Pool {
    /// Decodes what the queries of a layer need. A run's rows are decoded once for all its queries, unless that is more than
    /// each query's own choice taken together, as in a decode step of a long sequence.
    pub fn fill(&mut self, step: &Step<'_>, layer: LayerIdx, indexer: &IndexerScratch, cache: &Cache) {
        self.entries.clear();
        self.indices.clear();
        self.first_index.clear();
        self.first_index.push(0);
        for (run_idx, run) in step.runs.iter().enumerate() {
            let queries = run.first_row..run.first_row + run.n_rows;
            let visible = |t| indexer.visible(step, layer, t);
            let n_all = visible_groups(step, layer, queries.end - 1);
            let is_shared = n_all <= queries.clone().map(|t| visible(t).len()).sum();
            let base = self.entries.len();
            if is_shared {
                self.entries.extend((0..n_all).map(|group| (run_idx, group)));
            }
            for t in queries {
                let own_base = if is_shared { base } else { self.entries.len() };
                match visible(t) {
                    Visible::All(n) => {
                        if !is_shared {
                            self.entries.extend((0..n).map(|group| (run_idx, group)));
                        }
                        self.indices.extend((own_base..own_base + n).map(|i| i as u32));
                    }
                    Visible::Chosen(groups) if is_shared => {
                        self.indices.extend(groups.iter().map(|group| base as u32 + group));
                    }
                    Visible::Chosen(groups) => {
                        self.entries.extend(groups.iter().map(|&group| (run_idx, group as usize)));
                        self.indices.extend((own_base..own_base + groups.len()).map(|i| i as u32));
                    }
                }
                self.first_index.push(self.indices.len());
            }
        }
        let (head_dim, entries) = (step.shape.head_dim, &self.entries);
        let rows = fit(&mut self.rows, entries.len() * head_dim);
        step.cpu.par_chunks(rows, head_dim, DECODE_TILE, |i, row| {
            let (run_idx, group) = entries[i];
            cache.read_kv_row(step.runs[run_idx].blocks, layer, group, row);
        });
    }

    /// The most rows a query attends to.
    pub fn max_rows(&self) -> usize {
        self.first_index.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0)
    }

    /// The rows of query t, ascending by group.
    pub fn rows(&self, t: usize, head_dim: usize) -> impl Iterator<Item = &[f32]> {
        let indices = &self.indices[self.first_index[t]..self.first_index[t + 1]];
        indices.iter().map(move |&i| &self.rows[i as usize * head_dim..][..head_dim])
    }
}

/// Groups that are complete at row t's position: the query sees group g when (g + 1) * ratio <= position + 1.
pub(super) fn visible_groups(step: &Step<'_>, layer: LayerIdx, t: usize) -> usize {
    match step.shape.compress_ratios[layer.index()] {
        0 => 0,
        ratio => (step.positions[t] + 1) / ratio,
    }
}
