//! What kernels need of a device, read from compilers' metadata, and the limits they must keep.

use std::fmt::Write;
use std::path::Path;

use anyhow::ensure;

/// Local memory of a compute unit.
const LDS_BYTES: u64 = 64 * 1024;
/// Registers of a lane on a SIMD of gfx942, and in what steps they are given.
const VGPRS: u64 = 512;
const VGPR_STEP: u64 = 8;
/// Most waves on a SIMD, SIMDs of a compute unit, lanes of a wave.
const MAX_WAVES: u64 = 8;
const SIMDS: u64 = 4;
const WAVE: u64 = 64;
/// Registers and warps of a multiprocessor of sm_90, and in what steps registers are given to a lane.
const SM_REGISTERS: u64 = 65536;
const SM_WARPS: u64 = 64;

/// A target's table and what breaks a limit.
pub struct Table {
    pub text: String,
    pub faults: Vec<String>,
}

/// One kernel of a gfx942 code object. `vgprs` counts AGPRs, too: they share one file.
#[derive(Debug, Default, PartialEq, Eq)]
struct Gfx942Kernel {
    name: String,
    vgprs: u64,
    agprs: u64,
    sgprs: u64,
    lds_bytes: u64,
    scratch_bytes: u64,
    n_spills: u64,
    max_threads: u64,
}

impl Gfx942Kernel {
    /// Waves that a SIMD holds at once, by registers and by local memory.
    fn waves_per_simd(&self) -> u64 {
        let by_registers = VGPRS / self.vgprs.next_multiple_of(VGPR_STEP).max(VGPR_STEP);
        let waves_per_block = self.max_threads.div_ceil(WAVE);
        let by_lds = LDS_BYTES.checked_div(self.lds_bytes).map_or(MAX_WAVES, |n| n * waves_per_block / SIMDS);
        MAX_WAVES.min(by_registers).min(by_lds)
    }

    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if self.scratch_bytes > 0 || self.n_spills > 0 {
            faults.push(format!("{}: {} bytes of scratch, {} spills", self.name, self.scratch_bytes, self.n_spills));
        }
        if self.lds_bytes > LDS_BYTES {
            faults.push(format!("{}: {} bytes of LDS; at most {LDS_BYTES}", self.name, self.lds_bytes));
        }
        faults
    }
}

/// The table of a gfx942 code object from the text of `llvm-readelf --notes`.
pub fn gfx942(notes: &str) -> anyhow::Result<Table> {
    let kernels = parse_notes(notes);
    ensure!(!kernels.is_empty(), "the code object names no kernel");
    let width = kernels.iter().map(|kernel| kernel.name.len()).max().unwrap_or(0);
    let mut text = format!(
        "{:width$}  {:>5}  {:>5}  {:>5}  {:>6}  {:>7}  {:>10}\n",
        "kernel", "VGPR", "AGPR", "SGPR", "LDS", "scratch", "waves/SIMD"
    );
    for k in &kernels {
        let _ = writeln!(
            text,
            "{:width$}  {:>5}  {:>5}  {:>5}  {:>6}  {:>7}  {:>10}",
            k.name,
            k.vgprs - k.agprs.min(k.vgprs),
            k.agprs,
            k.sgprs,
            k.lds_bytes,
            k.scratch_bytes,
            k.waves_per_simd()
        );
    }
    Ok(Table { text, faults: kernels.iter().flat_map(Gfx942Kernel::faults).collect() })
}

/// Kernels are list items two columns in, their fields four; fields of arguments lie deeper.
fn parse_notes(notes: &str) -> Vec<Gfx942Kernel> {
    let mut kernels = Vec::new();
    for line in notes.lines() {
        if line.starts_with("  - .") {
            kernels.push(Gfx942Kernel::default());
        }
        let field = line.strip_prefix("  - .").or_else(|| line.strip_prefix("    ."));
        let (Some((key, value)), Some(kernel)) = (field.and_then(|field| field.split_once(':')), kernels.last_mut())
        else {
            continue;
        };
        let value = value.trim();
        let number = value.parse().unwrap_or(0);
        match key {
            "name" => kernel.name = value.to_owned(),
            "vgpr_count" => kernel.vgprs = number,
            "agpr_count" => kernel.agprs = number,
            "sgpr_count" => kernel.sgprs = number,
            "group_segment_fixed_size" => kernel.lds_bytes = number,
            "private_segment_fixed_size" => kernel.scratch_bytes = number,
            "sgpr_spill_count" | "vgpr_spill_count" => kernel.n_spills += number,
            "max_flat_workgroup_size" => kernel.max_threads = number,
            _ => {}
        }
    }
    kernels
}

/// The table of an sm_90a cubin from what ptxas says with -v. Spills are shown, not refused: gfx942 sets the limits.
pub fn sm90(messages: &str) -> anyhow::Result<Table> {
    let mut rows: Vec<(String, [u64; 5])> = Vec::new();
    for line in messages.lines() {
        if let Some(name) = line.split("entry function '").nth(1).and_then(|rest| rest.split('\'').next()) {
            rows.push((name.to_owned(), [0; 5]));
        }
        let Some((_, row)) = rows.last_mut() else { continue };
        if let Some(stack) = before(line, " bytes stack frame") {
            (row[2], row[3]) = (stack, before(line, " bytes spill stores").unwrap_or(0));
        }
        if let Some(registers) = before(line, " registers") {
            row[0] = registers;
            row[1] = before(line, " bytes smem").unwrap_or(0);
            // Warps are given in fours, registers in eights.
            row[4] = SM_WARPS.min(SM_REGISTERS / (registers.next_multiple_of(8).max(8) * 32) / 4 * 4);
        }
    }
    ensure!(!rows.is_empty(), "ptxas named no kernel:\n{messages}");
    rows.sort();
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut text = format!(
        "{:width$}  {:>9}  {:>6}  {:>5}  {:>6}  {:>8}\n",
        "kernel", "registers", "shared", "stack", "spills", "warps/SM"
    );
    for (name, [registers, shared, stack, spills, warps]) in rows {
        let _ = writeln!(text, "{name:width$}  {registers:>9}  {shared:>6}  {stack:>5}  {spills:>6}  {warps:>8}");
    }
    Ok(Table { text, faults: Vec::new() })
}

/// The number that stands before `what`.
fn before(line: &str, what: &str) -> Option<u64> {
    line.split(what).next().filter(|head| head.len() < line.len())?.split_whitespace().last()?.parse().ok()
}

/// The simulator's files and their sizes.
pub fn sim(out: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    for name in super::Target::Sim.outputs() {
        let _ = writeln!(text, "{name}  {} KiB", out.join(name).metadata()?.len() / 1024);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTES: &str = "amdhsa.kernels:
  - .agpr_count:     32
    .args:
      - .name:           args
        .offset:         0
    .group_segment_fixed_size: 48960
    .max_flat_workgroup_size: 256
    .name:           attention
    .private_segment_fixed_size: 0
    .sgpr_count:     66
    .sgpr_spill_count: 0
    .vgpr_count:     176
    .vgpr_spill_count: 0
  - .agpr_count:     0
    .group_segment_fixed_size: 65540
    .max_flat_workgroup_size: 1024
    .name:           wide
    .private_segment_fixed_size: 16
    .sgpr_count:     20
    .sgpr_spill_count: 0
    .vgpr_count:     8
    .vgpr_spill_count: 4
amdhsa.target:   amdgcn-amd-amdhsa--gfx942
";

    #[test]
    fn notes_give_registers_memory_and_faults() {
        let kernels = parse_notes(NOTES);
        assert_eq!(kernels.len(), 2);
        assert_eq!((kernels[0].name.as_str(), kernels[0].vgprs, kernels[0].agprs), ("attention", 176, 32));
        // One block of four waves fits beside its local memory: one wave on each of four SIMDs.
        assert_eq!(kernels[0].waves_per_simd(), 1);
        let table = gfx942(NOTES).unwrap();
        assert_eq!(table.faults.len(), 2, "{:?}", table.faults);
        assert!(table.faults.iter().all(|fault| fault.starts_with("wide")));
        assert!(table.text.contains("attention    144     32"), "{}", table.text);
        assert!(gfx942("").is_err());
    }

    #[test]
    fn registers_limit_waves() {
        let waves = |vgprs| Gfx942Kernel { vgprs, max_threads: 256, ..Gfx942Kernel::default() }.waves_per_simd();
        assert_eq!([8, 64, 65, 128, 129, 512].map(waves), [8, 8, 7, 4, 3, 1]);
    }

    #[test]
    fn ptxas_lines_become_rows() {
        let text = "ptxas info    : Compiling entry function 'linear' for 'sm_90a'
ptxas info    : Function properties for linear
    64 bytes stack frame, 76 bytes spill stores, 116 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 64 bytes cumulative stack size, 40960 bytes smem
";
        let table = sm90(text).unwrap();
        let row: Vec<&str> = table.text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(row, ["linear", "255", "40960", "64", "76", "8"]);
        assert!(sm90("").is_err());
    }
}
