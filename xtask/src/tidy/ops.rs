//! Rules about operations: each has a scalar `reference`, and kernels and tuning rows carry an operation's name.

use std::collections::BTreeSet;

use syn::spanned::Spanned;
use syn::visit::Visit;

use super::size::lines_of;
use super::source::Source;
use super::{Finding, Tree};

/// Lines a reference may have.
const REFERENCE_LINES: usize = 60;

/// Files of src/ops that hold no operation: the list, the table of cases, the metadata of a step.
const NO_OPS: [&str; 3] = ["mod", "case", "step"];

/// Every operation has a `reference` (or several, `reference_x`) of at most 60 lines.
pub fn references(tree: &Tree, findings: &mut Vec<Finding>) {
    let names: BTreeSet<&str> = tree.sources.iter().filter_map(|source| op_of(&source.path)).collect();
    for name in names {
        let files: Vec<&Source> = tree.sources.iter().filter(|source| op_of(&source.path) == Some(name)).collect();
        let mut n_found = 0;
        for source in &files {
            let mut finder = References { source, n_found: 0, findings };
            finder.visit_file(&source.file);
            n_found += finder.n_found;
        }
        if n_found == 0 {
            findings.push(Finding {
                path: files[0].path.clone(),
                line: 1,
                rule: "op-reference",
                what: format!("op `{name}` has no `reference`: a scalar form with f64 sums, at most 60 lines"),
            });
        }
    }
}

/// Kernels and tuning tables are named after an operation.
pub fn stems(tree: &Tree, findings: &mut Vec<Finding>) {
    let names: BTreeSet<&str> = tree.sources.iter().filter_map(|source| op_of(&source.path)).collect();
    for path in &tree.paths {
        let in_kernels = path.strip_prefix("kernels/").filter(|rest| !rest.starts_with("common/"));
        let stem = match (in_kernels, path.strip_prefix("tuning/")) {
            (Some(rest), _) if [".hip", ".metal"].iter().any(|end| rest.ends_with(end)) => rest,
            (_, Some(rest)) if rest.ends_with(".csv") => rest,
            _ => continue,
        };
        let stem = stem.rsplit('/').next().and_then(|file| file.split('.').next()).unwrap_or(stem);
        if !names.contains(stem) {
            findings.push(Finding {
                path: path.clone(),
                line: 1,
                rule: "op-stem",
                what: format!("no operation src/ops/{stem}.rs; one stem names op, kernel and tuning table"),
            });
        }
    }
}

/// The operation that a file belongs to: `linear` for src/ops/linear.rs and for src/ops/linear/packed.rs.
fn op_of(path: &str) -> Option<&str> {
    let name = path.strip_prefix("src/ops/")?.split('/').next()?.trim_end_matches(".rs");
    (!NO_OPS.contains(&name)).then_some(name)
}

struct References<'a> {
    source: &'a Source,
    n_found: usize,
    findings: &'a mut Vec<Finding>,
}

impl References<'_> {
    fn check(&mut self, sig: &syn::Signature, block: &syn::Block) {
        let name = sig.ident.to_string();
        if name != "reference" && !name.starts_with("reference_") {
            return;
        }
        let line = sig.span().start().line;
        if self.source.is_test(line) {
            return;
        }
        self.n_found += 1;
        let n_lines = lines_of(sig, block);
        if n_lines > REFERENCE_LINES {
            self.findings.push(Finding {
                path: self.source.path.clone(),
                line,
                rule: "op-reference",
                what: format!("`{name}` has {n_lines} lines; a reference is read, not run: at most {REFERENCE_LINES}"),
            });
        }
    }
}

impl<'ast> Visit<'ast> for References<'_> {
    fn visit_item_fn(&mut self, node: &'ast syn::ItemFn) {
        self.check(&node.sig, &node.block);
        syn::visit::visit_item_fn(self, node);
    }

    fn visit_impl_item_fn(&mut self, node: &'ast syn::ImplItemFn) {
        self.check(&node.sig, &node.block);
        syn::visit::visit_impl_item_fn(self, node);
    }

    fn visit_item_mod(&mut self, node: &'ast syn::ItemMod) {
        if node.ident == "reference" && !self.source.is_test(node.ident.span().start().line) {
            self.n_found += 1;
        }
        syn::visit::visit_item_mod(self, node);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tree_findings;
    use super::*;

    #[test]
    fn an_operation_has_a_reference() {
        let only_in_tests = "//! x\npub fn run() {}\n#[cfg(test)]\nmod tests {\n fn reference() {}\n}\n";
        assert!(tree_findings(references, &[("src/ops/linear.rs", only_in_tests)])[0].contains("`linear`"));
        let good = "//! x\npub fn run() {}\npub fn reference_fp8() {}\n";
        assert!(tree_findings(references, &[("src/ops/linear.rs", good), ("src/ops/mod.rs", "//! x\n")]).is_empty());
        assert!(tree_findings(references, &[("src/ops/case.rs", only_in_tests)]).is_empty());
        let split = [("src/ops/moe/mod.rs", "//! x\nmod reference;\n"), ("src/ops/moe/packed.rs", "//! x\n")];
        assert!(tree_findings(references, &split).is_empty());
    }

    #[test]
    fn a_reference_is_short_even_when_flat() {
        let text =
            format!("//! x\nfn reference(a: u8) -> u8 {{\nmatch a {{\n{}_ => 2,\n}}\n}}\n", "1 => 2,\n".repeat(57));
        assert_eq!(tree_findings(references, &[("src/ops/linear.rs", &text)]).len(), 1);
    }

    #[test]
    fn kernels_and_tuning_carry_an_operations_name() {
        let op = ("src/ops/linear.rs", "//! x\npub fn reference() {}\n");
        let good = [op, ("kernels/linear.hip", ""), ("kernels/common/wave.hip", ""), ("tuning/gfx942/linear.csv", "")];
        assert!(tree_findings(stems, &good).is_empty());
        for path in ["kernels/gemm.hip", "kernels/metal/gemm.metal", "kernels/sm90/gemm.hip", "tuning/gfx942/gemm.csv"]
        {
            assert_eq!(tree_findings(stems, &[op, (path, "")]).len(), 1, "{path}");
        }
    }
}
