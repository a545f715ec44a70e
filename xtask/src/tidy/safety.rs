//! The unsafe cage: where `unsafe` may stand, and the sentence that each block carries.

use proc_macro2::LineColumn;
use syn::spanned::Spanned;
use syn::visit::Visit;

use super::Finding;
use super::source::{Source, Token};

/// `unsafe` stands only under src/device and in src/mmap.rs, and each block or impl has a SAFETY sentence above it.
pub fn unsafe_cage(source: &Source, findings: &mut Vec<Finding>) {
    let in_cage = source.path.starts_with("src/device/") || source.path == "src/mmap.rs";
    let mut anchors = Anchors::default();
    anchors.visit_file(&source.file);
    for pair in source.tokens.windows(2) {
        let [token, next] = pair else { continue };
        if token.text != "unsafe" {
            continue;
        }
        let mut report = |what: &str| {
            let what = what.to_owned();
            findings.push(Finding { path: source.path.clone(), line: token.line, rule: "unsafe", what });
        };
        if !in_cage {
            report("`unsafe` stands only under src/device and in src/mmap.rs");
        } else if ["{", "impl"].contains(&next.text.as_str()) && !has_safety(source, &anchors, token) {
            report("needs `// SAFETY: ` above it and the fact that makes it sound");
        }
    }
}

/// Whether a SAFETY sentence stands directly above the line, or above the innermost statement around it.
fn has_safety(source: &Source, anchors: &Anchors, token: &Token) -> bool {
    let at = LineColumn { line: token.line, column: token.column };
    let around = anchors.spans.iter().filter(|(start, end)| (*start..=*end).contains(&at));
    let statement = around.map(|(start, _)| start.line).max();
    [Some(token.line), statement].into_iter().flatten().any(|line| comment_above(source, line).is_some_and(says_why))
}

/// The block of comment lines directly above a line; attributes between are passed over.
fn comment_above(source: &Source, line: usize) -> Option<String> {
    let above = &source.lines[..line.checked_sub(1)?];
    let mut block: Vec<&str> = Vec::new();
    for text in above.iter().rev().map(|text| text.trim()) {
        if let Some(comment) = text.strip_prefix("//") {
            block.push(comment.trim());
        } else if !(block.is_empty() && text.starts_with("#[")) {
            break;
        }
    }
    block.reverse();
    Some(block.join(" "))
}

fn says_why(comment: String) -> bool {
    comment.split_once("SAFETY:").is_some_and(|(_, fact)| fact.split_whitespace().count() >= 2)
}

/// Spans of statements, match arms and items: the places above which a comment speaks of what follows.
#[derive(Default)]
struct Anchors {
    spans: Vec<(LineColumn, LineColumn)>,
}

impl Anchors {
    fn note(&mut self, node: &impl Spanned) {
        self.spans.push((node.span().start(), node.span().end()));
    }
}

impl<'ast> Visit<'ast> for Anchors {
    fn visit_stmt(&mut self, node: &'ast syn::Stmt) {
        self.note(node);
        syn::visit::visit_stmt(self, node);
    }

    fn visit_arm(&mut self, node: &'ast syn::Arm) {
        self.note(node);
        syn::visit::visit_arm(self, node);
    }

    fn visit_item(&mut self, node: &'ast syn::Item) {
        self.note(node);
        syn::visit::visit_item(self, node);
    }
}

#[cfg(test)]
mod tests {
    use super::super::findings_of;
    use super::*;

    #[test]
    fn unsafe_stays_in_its_cage() {
        let text = "//! x\n// SAFETY: the length was checked above.\nfn f() { unsafe { g() } }\n";
        assert_eq!(findings_of(unsafe_cage, "src/kv/pool.rs", text).len(), 1);
        assert_eq!(findings_of(unsafe_cage, "tests/http.rs", text).len(), 1);
    }

    #[test]
    fn each_block_says_why_it_is_sound() {
        let bare = "//! x\nfn f() {\n    unsafe { g() }\n}\n";
        assert_eq!(findings_of(unsafe_cage, "src/mmap.rs", bare)[0].0, 3);
        let empty = "//! x\nfn f() {\n    // SAFETY:\n    unsafe { g() }\n}\n";
        assert_eq!(findings_of(unsafe_cage, "src/mmap.rs", empty)[0].0, 4);
        let other_statement =
            "//! x\nfn f() {\n    // SAFETY: the length was checked.\n    h();\n    unsafe { g() }\n}\n";
        assert_eq!(findings_of(unsafe_cage, "src/mmap.rs", other_statement)[0].0, 5);
        let implementation = "//! x\nunsafe impl Send for A {}\n";
        assert_eq!(findings_of(unsafe_cage, "src/device/cpu/a.rs", implementation).len(), 1);
    }

    #[test]
    fn the_sentence_may_stand_above_block_statement_or_arm() {
        for body in [
            "    // SAFETY: the length was checked\n    // at the top.\n    unsafe { g() }\n",
            "    // SAFETY: the length was checked.\n    let x = h(\n        unsafe { g() },\n    );\n",
            "    match a {\n        // SAFETY: the length was checked.\n        1 => unsafe { g() },\n        _ => 2,\n    }\n",
            "    // SAFETY: the length was checked.\n    #[cfg(unix)]\n    unsafe { g() }\n",
        ] {
            let text = format!("//! x\nfn f() {{\n{body}}}\n");
            assert!(findings_of(unsafe_cage, "src/device/cpu/a.rs", &text).is_empty(), "{body}");
        }
        assert!(findings_of(unsafe_cage, "src/device/cpu/a.rs", "//! x\nunsafe fn f() {}\n").is_empty());
    }
}
