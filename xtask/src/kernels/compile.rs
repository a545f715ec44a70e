//! Finding a target's compiler and calling it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};

use super::report::{self, Table};
use super::{Build, Target};

/// The oldest clang that knows every builtin that the kernels use.
const MIN_CLANG: u32 = 19;

/// A compiler and what it calls itself.
pub struct Compiler {
    path: PathBuf,
    pub version: String,
}

/// The first compiler on this machine that can build a target.
pub fn find(target: Target) -> anyhow::Result<Compiler> {
    let candidates: &[&str] = match target {
        Target::Gfx942 => {
            &["clang++-19", "clang++-20", "clang++-21", "clang++-22", "clang++", "/opt/rocm/llvm/bin/clang++"]
        }
        Target::Sm90a => &["nvcc", "/usr/local/cuda/bin/nvcc"],
        Target::Sim => &["g++", "clang++-19", "clang++"],
    };
    for name in candidates {
        let Ok(output) = Command::new(name).arg("--version").output() else { continue };
        let text = String::from_utf8_lossy(&output.stdout);
        let is_old = target == Target::Gfx942 && clang_major(&text).is_none_or(|major| major < MIN_CLANG);
        if !output.status.success() || is_old {
            continue;
        }
        // nvcc names its release in its last line but one, the others in their first.
        let line = text.lines().find(|line| line.contains("release")).or_else(|| text.lines().next());
        return Ok(Compiler { path: PathBuf::from(name), version: line.unwrap_or(name).trim().to_owned() });
    }
    let remedy = match target {
        Target::Gfx942 => "install clang-19, lld-19 and llvm-19, or ROCm",
        Target::Sm90a => "install CUDA 12.8 or later and put nvcc on PATH",
        Target::Sim => "install g++ or clang++",
    };
    bail!("none of {} works; {remedy}", candidates.join(", "))
}

/// A target's flags; contraction is off everywhere, so that targets differ as little as possible.
pub fn flags(target: Target) -> Vec<&'static str> {
    let text = match target {
        Target::Gfx942 => {
            "-x hip --offload-arch=gfx942 --offload-device-only -nogpuinc -nogpulib -O3 -std=c++17 -ffp-contract=off \
             --no-gpu-bundle-output -mcode-object-version=5 -Wall -Wextra -Werror -Wno-unused-function"
        }
        Target::Sm90a => "-x cu -std=c++17 -O3 -fmad=false -arch=sm_90a -cubin -Xptxas -v",
        Target::Sim => {
            "-x c++ -std=c++17 -O2 -fPIC -ffp-contract=off -fno-math-errno -pthread -Wall -Wextra -Werror \
             -Wno-unknown-pragmas -Wno-unused-function -DFLASHD_SIM"
        }
    };
    let mut flags: Vec<&str> = text.split_whitespace().collect();
    if target == Target::Sim && has_fma() {
        flags.push("-march=x86-64-v3");
    }
    flags
}

/// Compiles the unit of all kernels and looks at what came out.
pub fn run(build: &Build, target: Target, compiler: &Compiler, unit: &Path) -> anyhow::Result<Table> {
    match target {
        Target::Gfx942 => {
            let output = build.out.join("gfx942/flashd.co");
            compile(build, target, compiler, &[unit], &output, &[])?;
            report::gfx942(&read_notes(compiler, &output)?)
        }
        Target::Sm90a => {
            let messages = compile(build, target, compiler, &[unit], &build.out.join("sm_90a/flashd.cubin"), &[])?;
            report::sm90(&messages)
        }
        Target::Sim => run_sim(build, compiler, unit),
    }
}

/// The stand-in library holds the engine; the code objects take it from there.
fn run_sim(build: &Build, compiler: &Compiler, unit: &Path) -> anyhow::Result<Table> {
    let library = build.out.join("sim/libamdhip64.so");
    let sources = [build.kernels.join("sim/engine.cpp"), build.kernels.join("sim/hip.cpp")];
    let sources: Vec<&Path> = sources.iter().map(PathBuf::as_path).collect();
    let soname = ["-shared", "-DFLASHD_SIM_WAVE=64", "-Wl,-soname,libflashd_sim.so", "-ldl"];
    compile(build, Target::Sim, compiler, &sources, &library, &soname)?;
    let link = format!("-L{}", build.out.join("sim").display());
    let wave = |wave: u32| {
        let output = build.out.join(format!("sim{wave}/flashd.so"));
        let define = format!("-DFLASHD_SIM_WAVE={wave}");
        let last = ["-shared", "-fvisibility=hidden", &define, &link, "-lamdhip64"];
        compile(build, Target::Sim, compiler, &[unit], &output, &last)
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| wave(64));
        wave(32)?;
        other.join().map_err(|_| anyhow::anyhow!("the compiler's thread panicked"))?
    })?;
    [32, 64].iter().try_for_each(|wave| check_sim(build, compiler, *wave))?;
    Ok(Table { text: report::sim(&build.out)?, faults: Vec::new() })
}

/// The simulator's own checks: wrong kernels must fail, right ones must not.
fn check_sim(build: &Build, compiler: &Compiler, wave: u32) -> anyhow::Result<()> {
    let program = build.out.join(format!("sim{wave}/check"));
    let [check, engine] = ["sim/check.cpp", "sim/engine.cpp"].map(|name| build.kernels.join(name));
    compile(build, Target::Sim, compiler, &[&check, &engine], &program, &[&format!("-DFLASHD_SIM_WAVE={wave}")])?;
    let result = Command::new(&program).output().with_context(|| program.display().to_string())?;
    let said = String::from_utf8_lossy(&result.stdout);
    ensure!(result.status.success(), "checks of the simulator, wave {wave}: {}\n{said}", result.status);
    Ok(())
}

/// Calls the compiler; what it wrote to stderr. The output appears whole or not at all.
fn compile(
    build: &Build,
    target: Target,
    compiler: &Compiler,
    inputs: &[&Path],
    output: &Path,
    last: &[&str],
) -> anyhow::Result<String> {
    let folder = output.parent().context("an output lies in a folder")?;
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let part = output.with_extension("part");
    let mut command = Command::new(&compiler.path);
    command.args(flags(target)).arg("-I").arg(build.kernels).args(inputs).arg("-o").arg(&part);
    // Libraries come after what needs them, and must not be read as sources.
    let (libraries, other): (Vec<&str>, Vec<&str>) = last.iter().partition(|flag| flag.starts_with("-l"));
    command.args(other).args(libraries);
    let result = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output().context("calling the compiler")?;
    let messages = String::from_utf8_lossy(&result.stderr).into_owned() + &String::from_utf8_lossy(&result.stdout);
    ensure!(result.status.success(), "{command:?}: {}\n{messages}", result.status);
    std::fs::rename(&part, output).with_context(|| output.display().to_string())?;
    Ok(messages)
}

/// The metadata of a gfx942 code object.
fn read_notes(compiler: &Compiler, object: &Path) -> anyhow::Result<String> {
    let asked = Command::new(&compiler.path).arg("-print-prog-name=llvm-readelf").output()?;
    let beside = String::from_utf8_lossy(&asked.stdout).trim().to_owned();
    for name in [beside.as_str(), "llvm-readelf-19", "llvm-readelf"] {
        if let Ok(output) = Command::new(name).arg("--notes").arg(object).output() {
            ensure!(output.status.success(), "{name} --notes {}: {}", object.display(), output.status);
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
    }
    bail!("llvm-readelf is missing; install llvm-19")
}

/// The number after "clang version ".
fn clang_major(text: &str) -> Option<u32> {
    let after = text.split("clang version ").nth(1)?;
    after.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Whether the host has AVX2 and FMA; without FMA the simulator calls libm for it, which is right and slow.
fn has_fma() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::is_x86_feature_detected!("fma") && std::is_x86_feature_detected!("avx2");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_clang_is_read() {
        assert_eq!(clang_major("Debian clang version 19.1.7 (3~deb12u1)\nTarget: x86_64"), Some(19));
        assert_eq!(clang_major("AMD clang version 20.0.0git"), Some(20));
        assert_eq!(clang_major("g++ (Debian 12.2.0-14) 12.2.0"), None);
    }
}
