//! Speed of the matrix product: every stored form, one token and many, on one thread and on all.

use std::hint::black_box;

use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use flashd::device::cpu::{Cpu, SimdLevel};
use flashd::ops::linear::{LinearParams, linear};
use flashd::tensor::matrix::{Matrix, MatrixData};

fn matrices(n_rows: usize, n_cols: usize) -> [(&'static str, Matrix); 4] {
    let (n, k) = (n_rows, n_cols);
    let bytes = |len: usize| Bytes::from((0..len).map(|i| (i * 89 % 113) as u8).collect::<Vec<u8>>());
    let scales = |len: usize| Bytes::from(vec![120u8; len]);
    let fp8 = MatrixData::Fp8 { codes: bytes(n * k), scales: scales(n.div_ceil(128) * k.div_ceil(128)) };
    let mxfp4 = MatrixData::Mxfp4 { codes: bytes(n * k / 2), scales: scales(n * k / 32) };
    let bf16 = MatrixData::Bf16 { bits: Bytes::from([0x80, 0x3E].repeat(n * k)) };
    let f32 = MatrixData::F32 { values: vec![0.25f32; n * k].into() };
    let matrix = |data| Matrix { name: "".into(), n_rows, n_cols, data };
    [("fp8", matrix(fp8)), ("mxfp4", matrix(mxfp4)), ("bf16", matrix(bf16)), ("f32", matrix(f32))]
}

fn bench_linear(c: &mut Criterion) {
    let Ok(all) = Cpu::detect() else { return };
    let level = all.level().simd();
    let Ok(one) = Cpu::with_level(level, 1) else { return };
    for (n_rows, n_cols) in [(256, 256), (2048, 128), (256, 1024), (2048, 4096)] {
        let mut group = c.benchmark_group(format!("linear_{n_rows}x{n_cols}"));
        for (name, weight) in matrices(n_rows, n_cols) {
            for n_tokens in [1, 16, 256] {
                let (x, mut y) = (vec![0.5f32; n_tokens * n_cols], vec![0.0f32; n_tokens * n_rows]);
                // One multiply-add an element.
                group.throughput(Throughput::Elements((n_rows * n_cols * n_tokens) as u64));
                for (threads, cpu) in [("1", &one), ("all", &all)] {
                    group.bench_function(BenchmarkId::new(format!("{name}_{threads}"), n_tokens), |b| {
                        cpu.install(|| {
                            b.iter(|| linear(cpu, LinearParams::dense(black_box(&x), &weight, n_tokens, &mut y)));
                        });
                    });
                }
            }
        }
        group.finish();
    }
    assert_ne!(level, SimdLevel::Portable, "a bench of the portable form says little");
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(std::time::Duration::from_millis(100))
        .measurement_time(std::time::Duration::from_millis(400));
    targets = bench_linear
}
criterion_main!(benches);
