//! The project speaks of itself alone: no machine paths, no registry hosts, no notes to self, no files that are not here.

use std::path::Path;

use super::{Finding, Tree};

/// Data and vendored listings that are not prose.
const DATA: [&str; 8] = [
    "Cargo.lock",
    "LICENSE",
    "demo-model/tokenizer.json",
    "demo-model/model.safetensors.index.json",
    "tests/demo/",
    "tests/fixtures/",
    "tests/vectors/",
    "tools/demo-model/requirements.txt",
];

/// Text that belongs to one machine, spelt in halves so that this file passes its own rule.
const MACHINE: [&str; 4] =
    [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/home", "/"), concat!("/Us", "ers/")];
const HOSTS: [&str; 7] = [
    concat!("py", "pi.org"),
    concat!("pythonhosted", ".org"),
    concat!("crates", ".io"),
    concat!("registry.", "npmjs"),
    concat!("proxy.", "golang"),
    concat!("arti", "factory"),
    concat!("index-", "url"),
];
const NOTES: [&str; 3] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];

/// No text names a machine, a registry, a note to self or a document that is not in the tree.
pub fn speaks_of_itself(tree: &Tree, findings: &mut Vec<Finding>) {
    for (path, text) in &tree.texts {
        if DATA.iter().any(|data| path.starts_with(data)) {
            continue;
        }
        let source = tree.sources.iter().find(|source| source.path == *path);
        for (idx, text) in text.lines().enumerate() {
            let line = idx + 1;
            let mut faults = faults_of(text);
            // Tests may make up documents.
            if !source.is_some_and(|source| source.is_test(line)) {
                faults.extend(missing_documents(tree, path, text));
            }
            findings.extend(faults.into_iter().map(|what| Finding {
                path: path.clone(),
                line,
                rule: "itself-alone",
                what,
            }));
        }
    }
}

fn faults_of(line: &str) -> Vec<String> {
    let mut faults = Vec::new();
    for machine in MACHINE.iter().filter(|machine| line.contains(**machine)) {
        faults.push(format!("`{machine}` is a path of one machine"));
    }
    for host in HOSTS.iter().filter(|host| line.contains(**host)) {
        faults.push(format!("`{host}` names a package registry; its ordinary client knows where it is"));
    }
    for note in NOTES.iter().filter(|note| has_word(line, note)) {
        faults.push(format!("`{note}`: do it, or file it"));
    }
    if let Some(number) = numbered_fault(line) {
        faults.push(format!("`faults {number}` points into a list that is not in the tree; say the fault itself"));
    }
    faults
}

/// The number of a fault (a capital and digits) when a line cites one by number from a list outside the tree.
fn numbered_fault(line: &str) -> Option<&str> {
    let mut words = line.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.by_ref().find(|word| word.eq_ignore_ascii_case("faults") || word.eq_ignore_ascii_case("fault"))?;
    let number = words.next()?;
    let digits = number.strip_prefix(|c: char| c.is_ascii_uppercase())?;
    (!digits.is_empty() && digits.chars().all(|c| c.is_ascii_digit())).then_some(number)
}

fn missing_documents(tree: &Tree, path: &str, line: &str) -> Vec<String> {
    let missing = documents(line).filter(|document| !exists(tree, path, document));
    missing.map(|document| format!("`{document}` is not in the tree; say the rule itself")).collect()
}

fn has_word(line: &str, word: &str) -> bool {
    line.split(|c: char| !c.is_alphanumeric()).any(|part| part == word)
}

/// Names of Markdown files in a line, addresses left out.
fn documents(line: &str) -> impl Iterator<Item = &str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || "./_-:".contains(c);
    line.split(move |c: char| !is_name(c))
        .map(|word| word.trim_end_matches(['.', ':']))
        .filter(|word| word.len() > 3 && word.ends_with(".md") && !word.contains("://"))
}

/// Whether a document exists under the root, beside the file that names it, or in docs/.
fn exists(tree: &Tree, from: &str, document: &str) -> bool {
    let beside = Path::new(from).parent().map(|dir| dir.join(document));
    let candidates = [Some(document.into()), beside, Some(Path::new("docs").join(document))];
    candidates.into_iter().flatten().any(|candidate| tree.paths.contains(&normal(&candidate)))
}

/// A path without `.` and `..`.
fn normal(path: &Path) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.components() {
        match part.as_os_str().to_str() {
            Some("..") => {
                parts.pop();
            }
            Some(".") | None => {}
            Some(name) => parts.push(name),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::super::tree_findings;
    use super::*;

    #[test]
    fn machine_paths_hosts_and_notes_are_found() {
        for line in [
            concat!("see /wo", "rk/plan"),
            concat!("cd /ro", "ot/x"),
            concat!("pip install --index-", "url x"),
            concat!("https://py", "pi.org/simple"),
            concat!("// TO", "DO: later"),
            concat!("# FIX", "ME"),
            concat!("// a row of NaN (fau", "lts F4)"),
        ] {
            assert_eq!(tree_findings(speaks_of_itself, &[("docs/a.md", line)]).len(), 1, "{line}");
        }
    }

    #[test]
    fn a_document_that_is_named_exists() {
        let files = |line| [("docs/a.md", line), ("docs/numerics.md", ""), ("README.md", "")];
        assert!(
            tree_findings(speaks_of_itself, &files("see numerics.md, ../README.md and docs/numerics.md.")).is_empty()
        );
        assert!(tree_findings(speaks_of_itself, &files("see https://example.org/x.md")).is_empty());
        assert_eq!(
            tree_findings(speaks_of_itself, &files("see plan.md")),
            ["docs/a.md:1: itself-alone: `plan.md` is not in the tree; say the rule itself"]
        );
    }

    #[test]
    fn ordinary_text_and_data_pass() {
        let files = [
            ("src/a.rs", "//! Escapes are \\uXXXX in JSON; a workbench is no path.\n"),
            ("Cargo.lock", concat!("crates", ".io")),
        ];
        assert!(tree_findings(speaks_of_itself, &files).is_empty());
    }
}
