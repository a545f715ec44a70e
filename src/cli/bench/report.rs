//! The table and the CSV file of a run.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use anyhow::Context;
use comfy_table::{CellAlignment, Table, presets};

use super::request::Target;
use super::stats::Summary;

const CSV_HEADER: [&str; 22] = [
    "model",
    "base_url",
    "concurrency",
    "prompt_tokens",
    "output_tokens",
    "requests",
    "ok",
    "errors",
    "interrupted",
    "wall_s",
    "output_tok_s",
    "prefill_tok_s",
    "stream_tok_s_p50",
    "ttft_ms_p50",
    "ttft_ms_p90",
    "ttft_ms_p99",
    "itl_ms_p50",
    "itl_ms_p90",
    "itl_ms_p99",
    "cached_tokens",
    "first_error",
    "version",
];

/// Rows as they come.
pub(super) struct Report {
    model: String,
    base_url: String,
    csv: Option<csv::Writer<File>>,
    rows: Vec<Summary>,
}

/// Begins a CSV file. Rows are flushed one by one, so that a run that is stopped leaves what it measured.
pub(super) fn open_csv(path: &Path, header: &[&str]) -> anyhow::Result<csv::Writer<File>> {
    let open = || {
        let mut writer = csv::Writer::from_path(path)?;
        writer.write_record(header)?;
        writer.flush()?;
        anyhow::Ok(writer)
    };
    open().with_context(|| path.display().to_string())
}

impl Report {
    pub fn new(target: &Target, csv_file: Option<&Path>) -> anyhow::Result<Self> {
        let csv = csv_file.map(|path| open_csv(path, &CSV_HEADER)).transpose()?;
        Ok(Self { model: target.model.clone(), base_url: target.base_url.clone(), csv, rows: Vec::new() })
    }

    pub fn add(&mut self, row: Summary) -> anyhow::Result<()> {
        if let Some(csv) = &mut self.csv {
            csv.write_record(csv_record(&self.model, &self.base_url, &row))?;
            csv.flush()?;
        }
        self.rows.push(row);
        Ok(())
    }

    /// Prints the table and every kind of error, and gives the rows back.
    pub fn print(self, out: &mut impl Write) -> anyhow::Result<Vec<Summary>> {
        if !self.rows.is_empty() {
            writeln!(out, "{}", table(&self.rows))?;
        }
        for row in &self.rows {
            let at = format!("{} at once, {} tokens", row.point.concurrency, row.point.n_prompt);
            for (message, n) in &row.errors {
                writeln!(out, "error ({at}): {n} x {message}")?;
            }
            if row.n_cached > 0 {
                writeln!(out, "note ({at}): {} prompt tokens came from the prefix cache", row.n_cached)?;
            }
            if row.is_interrupted {
                writeln!(
                    out,
                    "note ({at}): interrupted after {} of {} requests",
                    row.n_ok + row.n_failed(),
                    row.point.n_requests
                )?;
            }
        }
        Ok(self.rows)
    }
}

fn table(rows: &[Summary]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY).set_header([
        "at once",
        "prompt",
        "output",
        "ok",
        "errors",
        "output tok/s",
        "prefill tok/s",
        "stream tok/s",
        "TTFT ms p50/p90/p99",
        "ITL ms p50/p90/p99",
    ]);
    for row in rows {
        let point = row.point;
        table.add_row([
            point.concurrency.to_string(),
            point.n_prompt.to_string(),
            point.n_output.to_string(),
            row.n_ok.to_string(),
            row.n_failed().to_string(),
            number(row.output_tok_s),
            number(row.prefill_tok_s),
            number(row.stream_tok_s.p50),
            [row.ttft_ms.p50, row.ttft_ms.p90, row.ttft_ms.p99].map(number).join(" / "),
            [row.gap_ms.p50, row.gap_ms.p90, row.gap_ms.p99].map(number).join(" / "),
        ]);
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn csv_record(model: &str, base_url: &str, row: &Summary) -> [String; CSV_HEADER.len()] {
    let cell = |value: f64| if value.is_finite() { format!("{value:.3}") } else { String::new() };
    let point = row.point;
    [
        model.to_owned(),
        base_url.to_owned(),
        point.concurrency.to_string(),
        point.n_prompt.to_string(),
        point.n_output.to_string(),
        point.n_requests.to_string(),
        row.n_ok.to_string(),
        row.n_failed().to_string(),
        row.is_interrupted.to_string(),
        cell(row.wall_s),
        cell(row.output_tok_s),
        cell(row.prefill_tok_s),
        cell(row.stream_tok_s.p50),
        cell(row.ttft_ms.p50),
        cell(row.ttft_ms.p90),
        cell(row.ttft_ms.p99),
        cell(row.gap_ms.p50),
        cell(row.gap_ms.p90),
        cell(row.gap_ms.p99),
        row.n_cached.to_string(),
        row.errors.keys().next().cloned().unwrap_or_default(),
        env!("CARGO_PKG_VERSION").to_owned(),
    ]
}

/// One decimal below 100, none above, a dash where there is nothing to show.
fn number(value: f64) -> String {
    match value {
        _ if !value.is_finite() => "-".to_owned(),
        _ if value < 100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}
