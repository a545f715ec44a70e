//! The house rules that the compiler and clippy do not know: each rule is a function from sources to findings.

mod form;
mod imports;
mod ops;
mod prose;
mod purity;
mod safety;
mod size;
mod source;

use std::collections::HashSet;
use std::fmt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};

use source::{Source, is_test_only};

/// A broken rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// Path from the repository root.
    pub path: String,
    /// 1-based line.
    pub line: usize,
    /// The rule's short name.
    pub rule: &'static str,
    /// What is wrong and what to do.
    pub what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}: {}", self.path, self.line, self.rule, self.what)
    }
}

/// All files of the repository that git tracks or would track.
pub struct Tree {
    /// Every path, sorted, with `/`.
    pub paths: Vec<String>,
    /// Text files: path and content.
    pub texts: Vec<(String, String)>,
    /// Parsed Rust files.
    pub sources: Vec<Source>,
}

/// Rules for one Rust file.
const FILE_RULES: [fn(&Source, &mut Vec<Finding>); 15] = [
    form::job_line,
    form::tests_last,
    form::module_names,
    form::allow_has_reason,
    form::no_ignored_tests,
    imports::direction,
    imports::pure_modules,
    purity::environment,
    purity::no_panics,
    purity::anyhow_at_the_top,
    purity::bounded_channels,
    purity::globals,
    safety::unsafe_cage,
    size::file_length,
    size::function_length,
];

/// Rules for the tree as a whole.
const TREE_RULES: [fn(&Tree, &mut Vec<Finding>); 3] = [ops::references, ops::stems, prose::speaks_of_itself];

/// Checks the tree and prints every finding; true when there is none.
pub fn run(root: &Path) -> anyhow::Result<bool> {
    let tree = Tree::load(root)?;
    let findings = check(&tree);
    for finding in &findings {
        println!("{finding}");
    }
    println!("tidy: {} files, {} findings", tree.paths.len(), findings.len());
    Ok(findings.is_empty())
}

fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in &tree.sources {
        for rule in FILE_RULES {
            rule(source, &mut findings);
        }
    }
    for rule in TREE_RULES {
        rule(tree, &mut findings);
    }
    findings.sort();
    findings.dedup();
    findings
}

impl Tree {
    fn load(root: &Path) -> anyhow::Result<Self> {
        let mut texts = Vec::new();
        let paths = list_files(root)?;
        for path in &paths {
            // Binary files (shards, goldens) are not UTF-8 and carry no prose.
            if let Ok(text) = std::fs::read_to_string(root.join(path)) {
                texts.push((path.clone(), text));
            }
        }
        Self::from_texts(paths, texts)
    }

    /// A tree from memory; `load` uses it too.
    pub fn from_texts(paths: Vec<String>, texts: Vec<(String, String)>) -> anyhow::Result<Self> {
        let mut sources = Vec::new();
        for (path, text) in texts.iter().filter(|(path, _)| path.ends_with(".rs")) {
            sources.push(Source::parse(path, text).with_context(|| format!("parsing {path}"))?);
        }
        let test_files = files_compiled_for_tests(&sources);
        for source in &mut sources {
            if test_files.iter().any(|stem| is_under(&source.path, stem)) {
                source.mark_as_test();
            }
        }
        Ok(Self { paths, texts, sources })
    }
}

/// Tracked files and new ones that are not ignored, as git sees them.
fn list_files(root: &Path) -> anyhow::Result<Vec<String>> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"])
        .current_dir(root)
        .output()
        .context("running git ls-files")?;
    ensure!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let mut paths: Vec<String> = String::from_utf8(output.stdout)?.split_terminator('\0').map(str::to_owned).collect();
    paths.retain(|path| root.join(path).is_file());
    paths.sort();
    Ok(paths)
}

/// Stems (path without `.rs` or `/mod.rs`) of modules that a parent declares under `#[cfg(test)]`.
fn files_compiled_for_tests(sources: &[Source]) -> HashSet<String> {
    let mut stems = HashSet::new();
    for source in sources {
        for item in &source.file.items {
            if let syn::Item::Mod(module) = item
                && module.content.is_none()
                && is_test_only(&module.attrs)
            {
                stems.insert(format!("{}/{}", module_dir(&source.path), module.ident));
            }
        }
    }
    stems
}

/// The folder where a file's child modules lie.
fn module_dir(path: &str) -> &str {
    for parent in ["/mod.rs", "/lib.rs", "/main.rs"] {
        if let Some(dir) = path.strip_suffix(parent) {
            return dir;
        }
    }
    path.trim_end_matches(".rs")
}

fn is_under(path: &str, stem: &str) -> bool {
    path.strip_prefix(stem).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
}

/// Runs one file rule on a snippet; what the rules' own tests use.
#[cfg(test)]
fn findings_of(rule: fn(&Source, &mut Vec<Finding>), path: &str, text: &str) -> Vec<(usize, String)> {
    let source = Source::parse(path, text).unwrap();
    let mut findings = Vec::new();
    rule(&source, &mut findings);
    findings.into_iter().map(|f| (f.line, f.what)).collect()
}

/// Runs one tree rule on files given as (path, text).
#[cfg(test)]
fn tree_findings(rule: fn(&Tree, &mut Vec<Finding>), files: &[(&str, &str)]) -> Vec<String> {
    let paths = files.iter().map(|(path, _)| (*path).to_owned()).collect();
    let texts = files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect();
    let mut findings = Vec::new();
    rule(&Tree::from_texts(paths, texts).unwrap(), &mut findings);
    findings.iter().map(Finding::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_reads_path_line_rule_what() {
        let finding = Finding { path: "src/a.rs".into(), line: 3, rule: "size", what: "too long".into() };
        assert_eq!(finding.to_string(), "src/a.rs:3: size: too long");
    }

    #[test]
    fn a_module_declared_for_tests_is_a_test_file() {
        let files = [
            ("src/kv/mod.rs".to_owned(), "//! x\n#[cfg(test)]\nmod simulation;\n".to_owned()),
            ("src/kv/simulation.rs".to_owned(), "//! x\nfn f() {}\n".to_owned()),
            ("src/kv/simulation/world.rs".to_owned(), "//! x\nfn f() {}\n".to_owned()),
            ("src/kv/pool.rs".to_owned(), "//! x\nfn f() {}\n".to_owned()),
        ];
        let tree = Tree::from_texts(Vec::new(), files.to_vec()).unwrap();
        let tests: Vec<_> = tree.sources.iter().map(|s| s.is_test(2)).collect();
        assert_eq!(tests, [true, true, true, false]);
    }

    #[test]
    fn the_whole_set_reports_each_broken_rule_once() {
        let text = "fn f() { x.unwrap(); }\n";
        let tree = Tree::from_texts(vec![], vec![("src/kv/pool.rs".into(), text.into())]).unwrap();
        let rules: Vec<_> = check(&tree).into_iter().map(|f| f.rule).collect();
        assert_eq!(rules, ["job-line", "no-panic"]);
    }
}
