//! A completion's text, in any pieces, to reasoning, content and tool calls; the same result at every split.
