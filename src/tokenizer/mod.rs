//! Tokens: text to ids by segments, and ids back to text without ever splitting a character.
