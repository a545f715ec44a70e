//! What the bench prints and writes: rows beside their floors, and time by kernel.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use comfy_table::{CellAlignment, Table, presets};

use crate::cli::bench::report::open_csv;
use crate::device::{Device, LaunchTime};
use crate::model::shape::ModelShape;

const CSV_HEADER: [&str; 20] = [
    "weights",
    "device",
    "layers",
    "experts",
    "version",
    "part",
    "streams",
    "tokens",
    "rows",
    "tok_s",
    "step_ms_p50",
    "floor_ms",
    "floor_share",
    "distinct_experts",
    "kernel",
    "grid",
    "launches",
    "us_sum",
    "us_each",
    "share",
];
/// Columns that are the same in every record.
const N_SAME: usize = 5;

/// One measured point.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub part: &'static str,
    pub n_streams: usize,
    /// Context or prompt.
    pub n_tokens: usize,
    /// Rows of a step.
    pub n_rows: usize,
    pub tok_s: f64,
    /// The median step.
    pub ms: f64,
    pub floor_ms: f64,
    /// Of a layer, in the mean.
    pub distinct_experts: f64,
}

/// Launches of one kernel, of one grid or of all.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct KernelTime {
    pub kernel: &'static str,
    /// `None`: all grids.
    pub grid: Option<[u32; 3]>,
    pub n_launches: usize,
    pub us: f64,
}

/// One step's launches by kernel, the longest first, each followed by its grids where it has several.
#[derive(Clone, Debug)]
pub(super) struct KernelTimes {
    pub kernels: Vec<KernelTime>,
    pub n_launches: usize,
    pub us: f64,
    n_layers: usize,
}

/// Where everything goes, as soon as it is known.
pub(super) struct Report<'a> {
    out: &'a mut dyn Write,
    csv: Option<csv::Writer<File>>,
    same: [String; N_SAME],
}

impl KernelTimes {
    /// Sums by kernel and grid.
    pub fn new(launches: &[LaunchTime], n_layers: usize) -> Self {
        let mut by_kernel: BTreeMap<&'static str, BTreeMap<[u32; 3], KernelTime>> = BTreeMap::new();
        for &LaunchTime { kernel, grid, ms } in launches {
            let grids = by_kernel.entry(kernel).or_default();
            let time = grids.entry(grid).or_insert(KernelTime { kernel, grid: Some(grid), ..KernelTime::default() });
            time.n_launches += 1;
            time.us += f64::from(ms) * 1e3;
        }
        let mut groups: Vec<Vec<KernelTime>> = by_kernel.into_values().map(with_sum).collect();
        groups.sort_by(|a, b| b[0].us.total_cmp(&a[0].us));
        let us = groups.iter().map(|group| group[0].us).sum();
        Self { kernels: groups.concat(), n_launches: launches.len(), us, n_layers }
    }
}

/// The sum of a kernel's grids, then the grids themselves unless there is but one.
fn with_sum(grids: BTreeMap<[u32; 3], KernelTime>) -> Vec<KernelTime> {
    let mut times: Vec<KernelTime> = grids.into_values().collect();
    if times.len() == 1 {
        return times;
    }
    times.sort_by(|a, b| b.us.total_cmp(&a.us));
    let sum = KernelTime {
        kernel: times[0].kernel,
        grid: None,
        n_launches: times.iter().map(|time| time.n_launches).sum(),
        us: times.iter().map(|time| time.us).sum(),
    };
    times.insert(0, sum);
    times
}

impl<'a> Report<'a> {
    /// Prints the heading and opens the file.
    pub fn new(
        out: &'a mut dyn Write,
        csv_file: Option<&Path>,
        device: &Device,
        shape: &ModelShape,
        seed: u64,
    ) -> anyhow::Result<Self> {
        let info = device.info();
        writeln!(
            out,
            "synthetic weights, seed {seed}: {} layers, {} experts a layer, on {} ({}, {})",
            shape.num_hidden_layers,
            shape.n_routed_experts,
            device.label(),
            info.name,
            info.arch
        )?;
        let csv = csv_file.map(|path| open_csv(path, &CSV_HEADER)).transpose()?;
        let same = [
            "synthetic".to_owned(),
            info.name.clone(),
            shape.num_hidden_layers.to_string(),
            shape.n_routed_experts.to_string(),
            env!("CARGO_PKG_VERSION").to_owned(),
        ];
        Ok(Self { out, csv, same })
    }

    /// A line of its own.
    pub fn note(&mut self, text: &str) -> anyhow::Result<()> {
        writeln!(self.out, "{text}")?;
        Ok(self.out.flush()?)
    }

    /// One part's table.
    pub fn rows(&mut self, title: &str, rows: &[Row]) -> anyhow::Result<()> {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY).set_header([
            "streams",
            "tokens",
            "tok/s",
            "step ms p50",
            "floor ms",
            "floor / step",
            "distinct experts",
        ]);
        for row in rows {
            table.add_row([
                row.n_streams.to_string(),
                row.n_tokens.to_string(),
                format!("{:.1}", row.tok_s),
                format!("{:.3}", row.ms),
                format!("{:.3}", row.floor_ms),
                format!("{:.3}", row.floor_ms / row.ms),
                format!("{:.1}", row.distinct_experts),
            ]);
            self.record(&[
                row.part.to_owned(),
                row.n_streams.to_string(),
                row.n_tokens.to_string(),
                row.n_rows.to_string(),
                format!("{:.2}", row.tok_s),
                format!("{:.4}", row.ms),
                format!("{:.4}", row.floor_ms),
                format!("{:.4}", row.floor_ms / row.ms),
                format!("{:.2}", row.distinct_experts),
            ])?;
        }
        self.print(title, table, 0)
    }

    /// The launches of one step.
    pub fn kernels(&mut self, step: &str, times: &KernelTimes) -> anyhow::Result<()> {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY).set_header([
            "kernel",
            "grid",
            "launches",
            "us in sum",
            "us each",
            "share",
        ]);
        for time in &times.kernels {
            let grid = time.grid.map_or_else(|| "all".to_owned(), |[x, y, z]| format!("{x} x {y} x {z}"));
            let cells = [
                time.kernel.to_owned(),
                grid,
                time.n_launches.to_string(),
                format!("{:.1}", time.us),
                format!("{:.2}", time.us / time.n_launches as f64),
                format!("{:.4}", time.us / times.us),
            ];
            let mut record = vec![format!("ops: {step}")];
            record.resize(CSV_HEADER.len() - N_SAME - cells.len(), String::new());
            record.extend(cells.iter().cloned());
            self.record(&record)?;
            table.add_row(cells);
        }
        let KernelTimes { n_launches, us, n_layers, .. } = times;
        let per_layer = *n_launches as f64 / *n_layers as f64;
        let title = format!(
            "time by kernel, {step}: {us:.0} us in {n_launches} launches, {per_layer:.1} a layer; with events around each launch"
        );
        self.print(&title, table, 2)
    }

    /// Numbers to the right, from some column on.
    fn print(&mut self, title: &str, mut table: Table, first_number: usize) -> anyhow::Result<()> {
        for column in table.column_iter_mut().skip(first_number) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        self.note(&format!("\n{title} (synthetic weights)\n{table}"))
    }

    /// One record of the file; what it lacks at its end is empty.
    fn record(&mut self, cells: &[String]) -> anyhow::Result<()> {
        if let Some(csv) = &mut self.csv {
            let mut record = self.same.to_vec();
            record.extend_from_slice(cells);
            record.resize(CSV_HEADER.len(), String::new());
            csv.write_record(record)?;
            csv.flush()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_are_summed_by_kernel_and_grid() {
        let launch = |kernel, x, ms| LaunchTime { kernel, grid: [x, 1, 1], ms };
        let launches = [launch("b", 1, 0.5), launch("a", 1, 0.25), launch("a", 2, 1.0), launch("a", 1, 0.25)];
        let times = KernelTimes::new(&launches, 2);
        assert_eq!((times.n_launches, times.us), (4, 2000.0));
        let rows: Vec<_> = times.kernels.iter().map(|t| (t.kernel, t.grid.map(|g| g[0]), t.n_launches, t.us)).collect();
        let want =
            [("a", None, 3, 1500.0), ("a", Some(2), 1, 1000.0), ("a", Some(1), 2, 500.0), ("b", Some(1), 1, 500.0)];
        assert_eq!(rows, want);
    }
}
