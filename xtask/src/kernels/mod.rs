//! `cargo xtask kernels`: one code object a target from all kernels, with a table of what each kernel needs of the device.

mod compile;
mod report;

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::ValueEnum;
use sha2::{Digest, Sha256};

use crate::ci::target_dir;
use compile::Compiler;

/// Options of `cargo xtask kernels`.
#[derive(clap::Args)]
pub struct KernelsArgs {
    /// Build this target only, and fail if its compiler is missing; may be repeated. Without it: every target whose compiler is
    /// here.
    #[arg(long, value_name = "TARGET")]
    target: Vec<Target>,
}

/// What kernels are built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Target {
    /// MI300X, by clang 19 or later.
    #[value(name = "gfx942")]
    Gfx942,
    /// Hopper, by nvcc.
    #[value(name = "sm_90a")]
    Sm90a,
    /// The simulator, waves of 32 and of 64, and its stand-in for HIP's library.
    #[value(name = "sim")]
    Sim,
}

impl Target {
    const ALL: [Self; 3] = [Self::Gfx942, Self::Sm90a, Self::Sim];

    const fn name(self) -> &'static str {
        match self {
            Self::Gfx942 => "gfx942",
            Self::Sm90a => "sm_90a",
            Self::Sim => "sim",
        }
    }

    /// What is built, below the folder of kernels.
    const fn outputs(self) -> &'static [&'static str] {
        match self {
            Self::Gfx942 => &["gfx942/flashd.co"],
            Self::Sm90a => &["sm_90a/flashd.cubin"],
            Self::Sim => &["sim/libamdhip64.so", "sim32/flashd.so", "sim64/flashd.so"],
        }
    }
}

/// The sources of one build and where its results go.
struct Build<'a> {
    kernels: &'a Path,
    out: PathBuf,
    /// SHA-256 of kernels and headers, without the simulator.
    source_hash: String,
    /// SHA-256 of everything below `kernels`.
    whole_hash: String,
}

/// Builds what was asked for; true when every kernel keeps within its limits.
pub fn run(root: &Path, args: &KernelsArgs) -> anyhow::Result<bool> {
    if !args.target.is_empty() {
        return build(root, &args.target, true);
    }
    build(root, &Target::ALL, false)
}

/// The gate's targets: sim, and gfx942, which may be left out where no compiler is unless `insist`.
pub fn for_gate(root: &Path, insist: bool) -> anyhow::Result<bool> {
    Ok(build(root, &[Target::Gfx942], insist)? & build(root, &[Target::Sim], true)?)
}

fn build(root: &Path, targets: &[Target], insist: bool) -> anyhow::Result<bool> {
    let kernels = root.join("kernels");
    let build = Build {
        out: target_dir(root).join("kernels"),
        source_hash: hash_files(&kernels, &kernel_files(&kernels)?)?,
        whole_hash: hash_files(&kernels, &files_below(&kernels)?)?,
        kernels: &kernels,
    };
    let mut is_good = true;
    for &target in targets {
        match compile::find(target) {
            Ok(compiler) => is_good &= build.target(target, &compiler)?,
            Err(error) if insist => return Err(error),
            Err(error) => println!("{}: left out: {error:#}", target.name()),
        }
    }
    Ok(is_good)
}

impl Build<'_> {
    /// Builds one target, or finds it built from the same sources by the same compiler; prints its table either way.
    fn target(&self, target: Target, compiler: &Compiler) -> anyhow::Result<bool> {
        let stamp = self.out.join(target.name()).join("build.txt");
        let key = self.key(target, compiler);
        let known = std::fs::read_to_string(&stamp).ok();
        let is_built = target.outputs().iter().all(|output| self.out.join(output).is_file());
        let known = known.as_deref().and_then(|text| text.split_once('\n'));
        if let Some((_, text)) = known.filter(|(known_key, _)| is_built && *known_key == key) {
            println!("{}: up to date\n{text}", target.name());
            return Ok(true);
        }
        println!("{}: building with {}", target.name(), compiler.version);
        let info = format!("source {} target {} compiler {}", self.source_hash, target.name(), compiler.version);
        let unit = self.write_unit(target, &info)?;
        let table = compile::run(self, target, compiler, &unit)?;
        println!("{}", table.text);
        for fault in &table.faults {
            eprintln!("error: {}: {fault}", target.name());
        }
        let is_good = table.faults.is_empty();
        if is_good {
            std::fs::write(&stamp, format!("{key}\n{}", table.text)).with_context(|| stamp.display().to_string())?;
        }
        Ok(is_good)
    }

    fn key(&self, target: Target, compiler: &Compiler) -> String {
        let flags = compile::flags(target).join(" ");
        hex(&Sha256::digest(format!("1 {} {} {} {flags}", self.whole_hash, compiler.version, target.name())))
    }

    /// One translation unit of all kernels: the headers first, then each kernel file in a namespace of its own, so that files
    /// cannot clash.
    fn write_unit(&self, target: Target, info: &str) -> anyhow::Result<PathBuf> {
        let mut text = String::new();
        for path in kernel_files(self.kernels)? {
            let name = path.to_string_lossy().into_owned();
            match name.strip_suffix(".hip") {
                Some(stem) => text += &format!("namespace file_{stem} {{\n#include \"{name}\"\n}}\n"),
                None if name.starts_with("common/target_") => {}
                None => text += &format!("#include \"{name}\"\n"),
            }
        }
        let qualifier = match target {
            Target::Gfx942 => "__attribute__((device, used, visibility(\"protected\")))",
            Target::Sm90a => "__device__",
            Target::Sim => "__attribute__((used, visibility(\"default\")))",
        };
        text += &format!("extern \"C\" {qualifier} const char flashd_build_info[] = {info:?};\n");
        let folder = self.out.join(target.name());
        std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let unit = folder.join("all.hip");
        std::fs::write(&unit, text).with_context(|| unit.display().to_string())?;
        Ok(unit)
    }
}

/// Headers in kernels/common and kernels in kernels/, headers first, each in the order of names.
fn kernel_files(kernels: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = files_below(kernels)?;
    files.retain(|path| match path.components().count() {
        1 => path.extension().is_some_and(|end| end == "hip"),
        _ => path.starts_with("common") && path.extension().is_some_and(|end| end == "h"),
    });
    files.sort_by_key(|path| (path.components().count() == 1, path.clone()));
    ensure!(!files.is_empty(), "no kernels in {}", kernels.display());
    Ok(files)
}

/// Every file below a folder, relative to it, in the order of names.
fn files_below(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).with_context(|| next.display().to_string())? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.push(path.strip_prefix(folder)?.to_path_buf());
            }
        }
    }
    files.sort();
    Ok(files)
}

fn hash_files(folder: &Path, files: &[PathBuf]) -> anyhow::Result<String> {
    let mut hash = Sha256::new();
    for file in files {
        let bytes = std::fs::read(folder.join(file)).with_context(|| file.display().to_string())?;
        hash.update(file.to_string_lossy().as_bytes());
        hash.update([0]);
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(&bytes);
    }
    Ok(hex(&hash.finalize()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_before_kernels_and_the_simulator_is_no_kernel() {
        let files = kernel_files(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels"))).unwrap();
        let first_kernel = files.iter().position(|path| path.components().count() == 1).unwrap();
        assert!(files[..first_kernel].iter().all(|path| path.starts_with("common")));
        assert!(files[..first_kernel].contains(&PathBuf::from("common/device.h")));
        assert!(files[first_kernel..].contains(&PathBuf::from("linear.hip")));
        assert!(files.iter().all(|path| !path.starts_with("sim")));
    }

    #[test]
    fn hashes_see_names_and_bytes() {
        let folder = std::env::temp_dir().join(format!("flashd-xtask-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let hash = |name: &str, text: &str| {
            std::fs::write(folder.join(name), text).unwrap();
            hash_files(&folder, &[PathBuf::from(name)]).unwrap()
        };
        let one = hash("a.hip", "x");
        assert_eq!(one.len(), 64);
        assert_ne!(one, hash("b.hip", "x"));
        assert_ne!(one, hash("a.hip", "y"));
        assert_eq!(one, hash("a.hip", "x"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
