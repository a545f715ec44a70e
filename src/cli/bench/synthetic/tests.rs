//! The whole command on the simulator, with a model that it can run.

use std::path::Path;

use clap::Parser;

use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: BenchArgs,
}

fn args(more: &[&str]) -> Result<BenchArgs, clap::Error> {
    Line::try_parse_from(["bench"].iter().chain(more)).map(|line| line.args)
}

fn fixture(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name).join("config.json").display().to_string()
}

/// What the command prints for a fixture's shape.
fn bench(name: &str, more: &[&str]) -> anyhow::Result<String> {
    let config = fixture(name);
    let args = args(&[&["--synthetic", &config, "--device", "sim"], more].concat())?;
    let mut out = Vec::new();
    measure(&args, &config, &mut out)?;
    Ok(String::from_utf8(out)?)
}

#[test]
fn every_part_is_measured_beside_its_floor() {
    let csv = tempfile::NamedTempFile::new().unwrap();
    let lengths = ["--streams", "2,1", "--contexts", "6,40,999999", "--prefills", "5", "--steps", "2"];
    let text = bench("odd", &[&lengths[..], &["--csv", csv.path().to_str().unwrap()]].concat()).unwrap();
    for want in ["synthetic weights, seed 0", "GB/s", "999999 tokens are left out", "filled by a kernel", "a layer"] {
        assert!(text.contains(want), "{want}: {text}");
    }
    let records: Vec<csv::StringRecord> =
        csv::Reader::from_path(csv.path()).unwrap().records().map(Result::unwrap).collect();
    let points: Vec<[&str; 3]> =
        records.iter().filter(|r| !r[5].starts_with("ops")).map(|r| [&r[5], &r[6], &r[7]]).collect();
    let want = [
        ["decode", "1", "6"],
        ["decode", "2", "6"],
        ["context", "1", "6"],
        ["context", "1", "40"],
        ["prefill", "1", "5"],
    ];
    assert_eq!(points, want);
    for record in &records[..want.len()] {
        for column in 9..14 {
            assert!(record[column].parse::<f64>().unwrap() > 0.0, "{record:?}");
        }
    }
    // A token takes K experts of each layer, two tokens at most twice as many.
    let config = std::fs::read(fixture("odd")).unwrap();
    let top_k = ModelShape::from_json(&config).unwrap().num_experts_per_tok as f64;
    let distinct = |idx: usize| records[idx][13].parse::<f64>().unwrap();
    assert!(distinct(0) == top_k && distinct(1) >= top_k && distinct(1) <= 2.0 * top_k);
    let steps: std::collections::BTreeSet<&str> =
        records.iter().filter(|r| r[5].starts_with("ops")).map(|r| &r[5]).collect();
    assert_eq!(steps.len(), 3, "{steps:?}");
    assert!(records.iter().any(|r| r[14].starts_with("attention") && r[16].parse::<usize>().unwrap() > 0));
}

#[test]
fn bad_values_are_told_plainly() {
    let refusal = |more: &[&str]| format!("{:#}", bench("small", more).unwrap_err());
    assert!(refusal(&["--experts", "1"]).contains("num_experts_per_tok"));
    assert!(refusal(&["--experts", "7"]).contains("a power of two"));
    assert!(refusal(&["--experts", "514"]).contains("at most 512"));
    assert!(refusal(&["--contexts", "999999"]).contains("longer than the model's"));
    assert!(args(&["--experts", "8"]).is_err());
    assert!(args(&["--synthetic", "real"]).is_err());
    assert!(args(&["--synthetic", "real", "--device", "sim", "--requests", "3"]).is_err());
    let error = format!("{:#}", config_json("nowhere.json", None).unwrap_err());
    assert!(error.contains("neither `real` nor a config.json"), "{error}");
}

#[test]
fn the_real_shape_is_the_official_one_with_fewer_experts() {
    let shape = ModelShape::from_json(&config_json(REAL, Some(192)).unwrap()).unwrap();
    let official = ModelShape::from_json(OFFICIAL_CONFIG.as_bytes()).unwrap();
    assert_eq!(shape, ModelShape { n_routed_experts: 192, ..official });
    // All parts of a run have room: eight streams of 128K and 64 of 1K.
    let args = args(&["--synthetic", "real", "--device", "cuda", "--experts", "192"]).unwrap();
    let places = Plan::new(&args.synthetic, &shape).unwrap().places(&shape);
    assert!(places.n_slots == 64 && places.max_rows == ROW_BUDGET && places.max_tokens > 131_072, "{places:?}");
    assert!(places.kv_bytes > 3 << 30 && places.kv_bytes < 5 << 30, "{places:?}");
}
