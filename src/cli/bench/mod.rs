//! `flashd bench`: drives a running server over HTTP and measures throughput, time to first token and gaps between tokens; or
//! the steps of a model with synthetic weights, without a server.

mod load;
mod report;
mod request;
mod stats;
mod synthetic;

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};

use self::load::{Load, Point};
use self::report::Report;
use self::request::Target;
use self::stats::Summary;
use self::synthetic::SyntheticArgs;

/// Measure a running server: throughput, time to first token and gaps between tokens, by concurrency. With --synthetic, measure
/// the steps of a model with synthetic weights on a device.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchArgs {
    /// Where the server listens.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub base_url: String,
    /// Model name to send; the first of /v1/models if not given.
    #[arg(long)]
    pub model: Option<String>,
    /// Key the server asks for.
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Requests in flight at once; a list is measured point by point.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,4,16", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub concurrency: Vec<u32>,
    /// Tokens of a prompt; a list is measured at every concurrency.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "256", value_parser = clap::value_parser!(u32).range(1..=4_000_000))]
    pub prompt_tokens: Vec<u32>,
    /// Tokens to generate, the end token ignored.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub output_tokens: u32,
    /// Requests of each point; 4 times its concurrency if not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub requests: Option<u32>,
    /// Requests sent first and not measured.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub warmup: u32,
    /// Sampling temperature.
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub temperature: f32,
    /// Largest token id in prompts; it must be in the vocabulary.
    #[arg(long, value_name = "ID", default_value_t = 3071, value_parser = clap::value_parser!(u32).range(101..))]
    pub max_token_id: u32,
    /// Seed of the prompts; the clock if not given, so that no run meets another run's prefix cache. With --synthetic, of weights
    /// and tokens, and 0 if not given.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Seconds after which a request counts as failed.
    #[arg(long, value_name = "S", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout_s: u64,
    /// Also write the table to FILE as CSV, a row as soon as its point is done.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Without a server.
    #[command(flatten)]
    pub synthetic: SyntheticArgs,
}

/// Runs the command.
///
/// # Errors
/// No server answers, the CSV file can't be written, or any request failed (the table is printed all the same). With
/// `--synthetic`, also what a device refuses.
pub fn run(args: &BenchArgs) -> anyhow::Result<()> {
    if let Some(shape) = &args.synthetic.synthetic {
        return synthetic::run(args, shape);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let summaries = runtime.block_on(measure(args, &mut std::io::stdout()))?;
    let n_failed: usize = summaries.iter().map(Summary::n_failed).sum();
    if n_failed > 0 {
        bail!("{n_failed} requests failed");
    }
    Ok(())
}

async fn measure(args: &BenchArgs, out: &mut impl Write) -> anyhow::Result<Vec<Summary>> {
    let target = connect(args).await?;
    let mut report = Report::new(&target, args.csv.as_deref())?;
    let seed = args.seed.unwrap_or_else(clock_seed);
    writeln!(out, "{} at {}, prompt seed {seed}", target.model, args.base_url)?;
    let load = Load { target: &target, seed, max_token_id: args.max_token_id };
    if args.warmup > 0 {
        let warmup = Point { concurrency: 1, n_requests: args.warmup, ..first_point(args) };
        let summary = load.drive(warmup, u64::MAX).await;
        if summary.is_interrupted {
            return Ok(Vec::new());
        }
        if summary.n_ok == 0 {
            bail!("no warm-up request succeeded: {}", summary.errors.into_keys().collect::<Vec<_>>().join("; "));
        }
    }
    for (point_idx, point) in (0..).zip(points(args)) {
        let summary = load.drive(point, point_idx).await;
        let is_interrupted = summary.is_interrupted;
        report.add(summary)?;
        if is_interrupted {
            break;
        }
    }
    report.print(out)
}

/// Makes the client and finds the model's name.
async fn connect(args: &BenchArgs) -> anyhow::Result<Target> {
    let client = reqwest::Client::builder().timeout(Duration::from_secs(args.timeout_s)).tcp_nodelay(true).build()?;
    let base_url = args.base_url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
    let mut target =
        Target { client, base_url, api_key: args.api_key.clone(), model: String::new(), temperature: args.temperature };
    target.model = match &args.model {
        Some(model) => model.clone(),
        None => target
            .first_model()
            .await
            .with_context(|| format!("no answer from {} (start a server with `flashd serve`)", args.base_url))?,
    };
    Ok(target)
}

fn points(args: &BenchArgs) -> impl Iterator<Item = Point> + '_ {
    args.prompt_tokens.iter().flat_map(move |&n_prompt| {
        args.concurrency.iter().map(move |&concurrency| Point {
            concurrency,
            n_requests: args.requests.unwrap_or(4 * concurrency),
            n_prompt,
            n_output: args.output_tokens,
        })
    })
}

fn first_point(args: &BenchArgs) -> Point {
    let n_prompt = args.prompt_tokens.first().copied().unwrap_or(1);
    Point { concurrency: 1, n_requests: 1, n_prompt, n_output: args.output_tokens.min(16) }
}

fn clock_seed() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_nanos() as u64)
}

#[cfg(test)]
mod tests;
