//! A parsed source file: its text, its tokens with line numbers, and which of its lines are tests.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use quote::ToTokens;
use syn::spanned::Spanned;
use syn::visit::Visit;

/// One Rust file, parsed once for all rules.
pub struct Source {
    /// Path from the repository root, with `/`.
    pub path: String,
    /// Lines without their ends.
    pub lines: Vec<String>,
    /// The syntax tree.
    pub file: syn::File,
    /// Every token in order; delimiters are tokens too.
    pub tokens: Vec<Token>,
    /// Line ranges (1-based, inclusive) of items compiled for tests only.
    tests: Vec<(usize, usize)>,
}

/// A token's text and line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// Text; `::` is one token.
    pub text: String,
    /// 1-based line.
    pub line: usize,
    /// 0-based column.
    pub column: usize,
}

impl Source {
    /// Parses a file.
    pub fn parse(path: &str, text: &str) -> syn::Result<Self> {
        let file = syn::parse_file(text)?;
        let mut tokens = Vec::new();
        flatten(text.parse::<TokenStream>().map_err(|e| syn::Error::new(e.span(), e))?, &mut tokens);
        let mut finder = TestFinder::default();
        finder.visit_file(&file);
        let lines = text.lines().map(str::to_owned).collect();
        let mut source = Self { path: path.to_owned(), lines, file, tokens, tests: finder.ranges };
        if path.starts_with("tests/") {
            source.mark_as_test();
        }
        Ok(source)
    }

    /// Declares the whole file a test: an integration test, or a module that its parent compiles for tests only.
    pub fn mark_as_test(&mut self) {
        self.tests = vec![(1, usize::MAX)];
    }

    /// Whether a line is compiled for tests only.
    pub fn is_test(&self, line: usize) -> bool {
        self.tests.iter().any(|&(start, end)| (start..=end).contains(&line))
    }

    /// The top-level module of a library file (`engine` for src/engine/tick.rs), or none outside src/.
    pub fn module(&self) -> Option<&str> {
        let inner = self.path.strip_prefix("src/")?;
        Some(inner.split('/').next()?.trim_end_matches(".rs"))
    }

    /// How many modules lie between this file and the crate root: 1 for src/kv/mod.rs, 2 for src/kv/pool.rs.
    pub fn depth(&self) -> usize {
        let inner = self.path.strip_prefix("src/").unwrap_or(&self.path);
        let is_parent = inner.ends_with("/mod.rs") || inner == "lib.rs" || inner == "main.rs";
        inner.split('/').count() - usize::from(is_parent)
    }

    /// Names that follow `prefix::` (also inside braces: `a::{b, c::d}` gives b and c), with their lines.
    pub fn names_after(&self, prefix: &[&str]) -> Vec<Token> {
        let mut found = Vec::new();
        for start in 0..self.tokens.len() {
            let Some(end) = self.path_at(start, prefix) else { continue };
            match self.tokens.get(end).map(|t| t.text.as_str()) {
                Some("{") => self.first_names(end, &mut found),
                Some(_) => found.push(self.tokens[end].clone()),
                None => {}
            }
        }
        found
    }

    /// Where in the token list `a::b::` ends, if it stands at `start`.
    fn path_at(&self, start: usize, prefix: &[&str]) -> Option<usize> {
        let mut at = start;
        for segment in prefix {
            if self.tokens.get(at)?.text != *segment || self.tokens.get(at + 1)?.text != "::" {
                return None;
            }
            at += 2;
        }
        Some(at)
    }

    /// The first identifier of each entry of the brace group that opens at `open`.
    fn first_names(&self, open: usize, found: &mut Vec<Token>) {
        let mut depth = 0;
        let mut at_entry = false;
        for token in &self.tokens[open..] {
            match token.text.as_str() {
                "{" => {
                    depth += 1;
                    at_entry = depth == 1;
                }
                "}" => {
                    depth -= 1;
                    if depth == 0 {
                        return;
                    }
                }
                "," => at_entry = depth == 1,
                _ if at_entry => {
                    found.push(token.clone());
                    at_entry = false;
                }
                _ => {}
            }
        }
    }
}

/// Whether attributes compile an item for tests only.
pub fn is_test_only(attrs: &[syn::Attribute]) -> bool {
    attrs.iter().any(|attr| {
        let text = attr.meta.to_token_stream().to_string();
        attr.path().is_ident("test") || text == "cfg (test)" || text.starts_with("cfg (all (test ,")
    })
}

fn flatten(stream: TokenStream, out: &mut Vec<Token>) {
    let mut last_colon = false;
    for tree in stream {
        let start = tree.span().start();
        let colon = matches!(&tree, TokenTree::Punct(p) if p.as_char() == ':');
        match tree {
            TokenTree::Group(group) => {
                let (open, close_text) = match group.delimiter() {
                    Delimiter::Parenthesis => ("(", ")"),
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::None => ("", ""),
                };
                out.push(Token { text: open.into(), line: start.line, column: start.column });
                flatten(group.stream(), out);
                let close = group.span_close().start();
                out.push(Token { text: close_text.into(), line: close.line, column: close.column });
            }
            TokenTree::Punct(_) if colon && last_colon => {
                if let Some(last) = out.last_mut() {
                    last.text = "::".into();
                }
                last_colon = false;
                continue;
            }
            other => out.push(Token { text: other.to_string(), line: start.line, column: start.column }),
        }
        last_colon = colon;
    }
}

#[derive(Default)]
struct TestFinder {
    ranges: Vec<(usize, usize)>,
}

impl TestFinder {
    fn note(&mut self, attrs: &[syn::Attribute], node: &impl Spanned) {
        if is_test_only(attrs) {
            self.ranges.push((node.span().start().line, node.span().end().line));
        }
    }
}

impl<'ast> Visit<'ast> for TestFinder {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        match item {
            syn::Item::Mod(node) => self.note(&node.attrs, node),
            syn::Item::Fn(node) => self.note(&node.attrs, node),
            syn::Item::Impl(node) => self.note(&node.attrs, node),
            syn::Item::Use(node) => self.note(&node.attrs, node),
            syn::Item::Struct(node) => self.note(&node.attrs, node),
            syn::Item::Const(node) => self.note(&node.attrs, node),
            syn::Item::Static(node) => self.note(&node.attrs, node),
            _ => {}
        }
        syn::visit::visit_item(self, item);
    }

    fn visit_impl_item_fn(&mut self, node: &'ast syn::ImplItemFn) {
        self.note(&node.attrs, node);
        syn::visit::visit_impl_item_fn(self, node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_paths_and_groups() {
        let text = "//! x\nuse crate::{kv::{a, b}, model::c};\nfn f() { crate::ids::g(); m!(crate::device::h) }\n";
        let source = Source::parse("src/engine/tick.rs", text).unwrap();
        let names: Vec<_> = source.names_after(&["crate"]).into_iter().map(|t| (t.text, t.line)).collect();
        assert_eq!(names, [("kv".into(), 2), ("model".into(), 2), ("ids".into(), 3), ("device".into(), 3)]);
    }

    #[test]
    fn test_items_are_known_by_their_lines() {
        let text = "//! x\nfn a() {}\n#[cfg(test)]\nmod tests {\n    fn b() {}\n}\n";
        let source = Source::parse("src/kv/pool.rs", text).unwrap();
        assert!(!source.is_test(2) && source.is_test(4) && source.is_test(5));
        assert_eq!((source.module(), source.depth()), (Some("kv"), 2));
        assert!(Source::parse("tests/http.rs", text).unwrap().is_test(2));
    }
}
