//! Rules about size: a function fits a screen, a file fits a head.

use syn::spanned::Spanned;
use syn::visit::Visit;

use super::Finding;
use super::source::{Source, is_test_only};

/// Lines a function may have.
const FUNCTION_LINES: usize = 60;
/// Lines of a function whose body is one match or one flat literal.
const FLAT_FUNCTION_LINES: usize = 100;
/// Lines of a file before its tests.
const FILE_LINES: usize = 600;

/// A file has at most 600 lines before its tests.
pub fn file_length(source: &Source, findings: &mut Vec<Finding>) {
    if source.is_test(1) {
        return;
    }
    let tests = source.file.items.iter().find_map(|item| match item {
        syn::Item::Mod(module) if module.content.is_some() && is_test_only(&module.attrs) => Some(module.span()),
        _ => None,
    });
    let n_lines = tests.map_or(source.lines.len(), |span| span.start().line - 1);
    if n_lines > FILE_LINES {
        findings.push(Finding {
            path: source.path.clone(),
            line: FILE_LINES + 1,
            rule: "file-length",
            what: format!("{n_lines} lines before the tests; at most {FILE_LINES}: split it by job"),
        });
    }
}

/// A function has at most 60 lines, or 100 when its body is one match or one flat literal.
pub fn function_length(source: &Source, findings: &mut Vec<Finding>) {
    let mut functions = Functions { source, findings };
    functions.visit_file(&source.file);
}

/// Lines from the signature to the closing brace.
pub fn lines_of(sig: &syn::Signature, block: &syn::Block) -> usize {
    block.span().end().line + 1 - sig.span().start().line
}

struct Functions<'a> {
    source: &'a Source,
    findings: &'a mut Vec<Finding>,
}

impl Functions<'_> {
    fn check(&mut self, sig: &syn::Signature, block: &syn::Block) {
        let n_lines = lines_of(sig, block);
        let limit = if is_flat(block) { FLAT_FUNCTION_LINES } else { FUNCTION_LINES };
        if n_lines > limit {
            self.findings.push(Finding {
                path: self.source.path.clone(),
                line: sig.span().start().line,
                rule: "function-length",
                what: format!("`{}` has {n_lines} lines; at most {limit}: split it in named steps", sig.ident),
            });
        }
    }
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_fn(&mut self, node: &'ast syn::ItemFn) {
        self.check(&node.sig, &node.block);
        syn::visit::visit_item_fn(self, node);
    }

    fn visit_impl_item_fn(&mut self, node: &'ast syn::ImplItemFn) {
        self.check(&node.sig, &node.block);
        syn::visit::visit_impl_item_fn(self, node);
    }

    fn visit_trait_item_fn(&mut self, node: &'ast syn::TraitItemFn) {
        if let Some(block) = &node.default {
            self.check(&node.sig, block);
        }
        syn::visit::visit_trait_item_fn(self, node);
    }
}

/// One statement, and that a match or a literal (an array, a struct, a list or JSON macro, or one wrapped in a call).
fn is_flat(block: &syn::Block) -> bool {
    match block.stmts.as_slice() {
        [syn::Stmt::Expr(expr, _)] => is_flat_expr(expr),
        [syn::Stmt::Macro(stmt)] => is_list_macro(&stmt.mac),
        _ => false,
    }
}

fn is_flat_expr(expr: &syn::Expr) -> bool {
    match expr {
        syn::Expr::Match(_) | syn::Expr::Array(_) | syn::Expr::Struct(_) => true,
        syn::Expr::Macro(expr) => is_list_macro(&expr.mac),
        syn::Expr::Reference(expr) => is_flat_expr(&expr.expr),
        syn::Expr::Call(call) => call.args.len() == 1 && call.args.iter().all(is_flat_expr),
        _ => false,
    }
}

fn is_list_macro(mac: &syn::Macro) -> bool {
    mac.path.segments.last().is_some_and(|name| name.ident == "vec" || name.ident == "json")
}

#[cfg(test)]
mod tests {
    use super::super::findings_of;
    use super::*;

    fn function(n_lines: usize, open: &str, line: &str, close: &str) -> String {
        format!("//! x\nfn f() {{\n{open}\n{}{close}\n}}\n", line.repeat(n_lines - 4))
    }

    #[test]
    fn a_function_has_sixty_lines() {
        let at = |n| findings_of(function_length, "src/a.rs", &function(n, "g();", "g();\n", "g();"));
        assert!(at(60).is_empty());
        assert_eq!(at(61)[0].0, 2);
    }

    #[test]
    fn a_flat_body_has_a_hundred() {
        for (open, line, close) in
            [("match a {", "1 => 2,\n", "}"), ("vec![", "1,\n", "]"), ("Ok(A {", "a: 1,\n", "})")]
        {
            let at = |n| findings_of(function_length, "src/a.rs", &function(n, open, line, close)).len();
            assert_eq!((at(61), at(100), at(101)), (0, 0, 1), "{open}");
        }
    }

    #[test]
    fn methods_count_too() {
        let text = format!("//! x\nimpl A {{\nfn f() {{\n{}}}\n}}\n", "g();\n".repeat(60));
        assert_eq!(findings_of(function_length, "src/a.rs", &text)[0].0, 3);
    }

    #[test]
    fn a_file_has_six_hundred_lines_before_tests() {
        let text = |n: usize, tests: &str| format!("//! x\n{}{tests}", "const A: u8 = 1;\n".repeat(n - 1));
        assert!(findings_of(file_length, "src/a.rs", &text(600, "")).is_empty());
        assert_eq!(findings_of(file_length, "src/a.rs", &text(601, "")).len(), 1);
        let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", "fn f() {}\n".repeat(500));
        assert!(findings_of(file_length, "src/a.rs", &text(600, &tests)).is_empty());
        assert!(findings_of(file_length, "tests/a.rs", &text(601, "")).is_empty());
    }
}
