//! The known tokens of a sequence, prompt and output, read as one list without copying the prompt.

use crate::ids::TokenId;

/// Prompt followed by output.
#[derive(Clone, Copy, Debug)]
pub struct TokenView<'a> {
    /// The request's prompt.
    pub prompt: &'a [TokenId],
    /// What has been generated and is known on the host.
    pub output: &'a [TokenId],
}

impl<'a> TokenView<'a> {
    /// Tokens in all.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.prompt.len() + self.output.len()
    }

    /// No tokens at all.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The tokens from `start` to before `end`; fewer if the list ends sooner.
    pub fn range(&self, start: usize, end: usize) -> impl Iterator<Item = TokenId> + use<'a> {
        let (prompt, output) = self.parts(start, end);
        prompt.iter().chain(output).copied()
    }

    /// Appends the tokens from `start` to before `end`.
    pub fn append_to(&self, tokens: &mut Vec<TokenId>, start: usize, end: usize) {
        let (prompt, output) = self.parts(start, end);
        tokens.extend_from_slice(prompt);
        tokens.extend_from_slice(output);
    }

    /// Whether the tokens at `start` begin with `other`.
    #[must_use]
    pub fn matches(&self, start: usize, other: &[TokenId]) -> bool {
        let (prompt, output) = self.parts(start, start + other.len());
        prompt.len() + output.len() == other.len()
            && prompt == &other[..prompt.len()]
            && output == &other[prompt.len()..]
    }

    fn parts(&self, start: usize, end: usize) -> (&'a [TokenId], &'a [TokenId]) {
        let n_prompt = self.prompt.len();
        let in_prompt = start.min(n_prompt)..end.min(n_prompt);
        let n_output = self.output.len();
        let in_output = start.saturating_sub(n_prompt).min(n_output)..end.saturating_sub(n_prompt).min(n_output);
        (&self.prompt[in_prompt], &self.output[in_output])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cross_from_prompt_to_output() {
        let (prompt, output) = ([1, 2, 3].map(TokenId), [4, 5].map(TokenId));
        let view = TokenView { prompt: &prompt, output: &output };
        let whole = [1, 2, 3, 4, 5].map(TokenId);
        assert_eq!(view.len(), 5);
        assert!(!view.is_empty());
        for start in 0..=5 {
            for end in start..=6 {
                let want = &whole[start..end.min(5)];
                assert_eq!(view.range(start, end).collect::<Vec<_>>(), want);
                let mut appended = Vec::new();
                view.append_to(&mut appended, start, end);
                assert_eq!(appended, want);
                assert!(view.matches(start, want));
            }
        }
        assert!(!view.matches(2, &[3, 9].map(TokenId)));
        assert!(!view.matches(4, &[5, 6].map(TokenId)));
    }
}
