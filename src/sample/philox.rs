//! Counter-based noise: Philox4x32-10, so that a draw depends on what it is for and never on what was drawn before.
//!
//! The key is the request's 64-bit seed (low word first). The counter's words are, in order: the position the token will
//! have, the purpose, the vocabulary index divided by four (the four output words serve four neighbours), and the index
//! of the choice among the request's n. Two draws that differ in any of these are independent, whatever the batch.

/// What a draw is for. Draws for different purposes are independent, as the proof of speculative sampling asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Choosing a drafted token.
    Draft = 0,
    /// Accepting or rejecting a drafted token.
    Accept = 1,
    /// Choosing the token in place of a rejected one.
    Recover = 2,
    /// Choosing a token from the model's own distribution.
    Sample = 3,
}

/// The noise of one choice of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noise {
    key: [u32; 2],
    choice: u32,
}

/// No Gumbel draw is larger: u is at most 1 - 2^-25, and -ln(-ln u) is then 25 ln 2 = 17.3286….
pub const MAX_GUMBEL: f64 = 17.329;

impl Noise {
    /// The noise of choice `choice` of a request with this seed.
    #[must_use]
    pub const fn new(seed: u64, choice: u32) -> Self {
        Self { key: [seed as u32, (seed >> 32) as u32], choice }
    }

    /// The request's seed.
    #[must_use]
    pub const fn seed(&self) -> u64 {
        (self.key[1] as u64) << 32 | self.key[0] as u64
    }

    /// The choice's index.
    #[must_use]
    pub const fn choice(&self) -> u32 {
        self.choice
    }

    /// The four words for vocabulary indices `4 group .. 4 group + 4`. Positions are below 2^32.
    #[must_use]
    pub const fn words(&self, purpose: Purpose, position: usize, group: u32) -> [u32; 4] {
        philox4x32_10([position as u32, purpose as u32, group, self.choice], self.key)
    }

    /// A uniform draw in (0, 1) for one vocabulary index.
    #[must_use]
    pub const fn uniform(&self, purpose: Purpose, position: usize, index: u32) -> f64 {
        uniform(self.words(purpose, position, index >> 2)[(index & 3) as usize])
    }
}

/// The top 24 bits of a word as the middle of one of 2^24 equal cells of (0, 1): never 0 and never 1. In f64, because the
/// half is lost in f32 above one half.
#[must_use]
pub const fn uniform(word: u32) -> f64 {
    ((word >> 8) as f64 + 0.5) / (1u32 << 24) as f64
}

/// A standard Gumbel draw, -ln(-ln u).
#[must_use]
pub fn gumbel(word: u32) -> f64 {
    -(-uniform(word).ln()).ln()
}

/// Philox4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
#[must_use]
pub const fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let mut round = 0;
    while round < 10 {
        let product_0 = 0xD251_1F53_u64 * counter[0] as u64;
        let product_1 = 0xCD9E_8D57_u64 * counter[2] as u64;
        counter = [
            (product_1 >> 32) as u32 ^ counter[1] ^ key[0],
            product_1 as u32,
            (product_0 >> 32) as u32 ^ counter[3] ^ key[1],
            product_0 as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
        round += 1;
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random123's known answers for philox4x32 with 10 rounds.
    #[test]
    fn known_answers() {
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, want) in cases {
            assert_eq!(philox4x32_10(counter, key), want);
        }
    }

    #[test]
    fn counter_and_key_words_stand_where_the_contract_says() {
        let noise = Noise::new(0x2222_2222_1111_1111, 7);
        let want = philox4x32_10([9, 2, 5, 7], [0x1111_1111, 0x2222_2222]);
        assert_eq!(noise.words(Purpose::Recover, 9, 5), want);
        assert_eq!(noise.uniform(Purpose::Recover, 9, 22), uniform(want[2]));
    }

    #[test]
    fn uniform_never_touches_its_ends() {
        assert_eq!(uniform(0), 0.5 / 16_777_216.0);
        assert_eq!(uniform(u32::MAX), 1.0 - 0.5 / 16_777_216.0);
        assert!(gumbel(u32::MAX) < MAX_GUMBEL && gumbel(u32::MAX) > MAX_GUMBEL - 0.01);
        assert!(gumbel(0).is_finite());
    }

    /// Correlation of two streams of uniforms, in standard errors.
    fn correlation(pairs: impl Iterator<Item = (f64, f64)>) -> f64 {
        let (mut n, mut sum) = (0.0, 0.0);
        for (a, b) in pairs {
            sum += (a - 0.5) * (b - 0.5) * 12.0;
            n += 1.0;
        }
        sum / f64::sqrt(n)
    }

    #[test]
    fn streams_are_independent_across_purpose_position_choice_and_seed() {
        const N: usize = 100_000;
        let purposes = [Purpose::Draft, Purpose::Accept, Purpose::Recover, Purpose::Sample];
        let noise = Noise::new(42, 0);
        for (i, a) in purposes.into_iter().enumerate() {
            for b in purposes.into_iter().skip(i + 1) {
                let z = correlation((0..N).map(|p| (noise.uniform(a, p, 3), noise.uniform(b, p, 3))));
                assert!(z.abs() < 4.0, "{a:?} {b:?}: {z}");
            }
        }
        // (seed, choice, position step, index) of a stream that differs from (1, 0, 0, 0) in one of them.
        for (seed, choice, step, index) in [(2, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1), (1, 0, 0, 4)] {
            let (base, other) = (Noise::new(1, 0), Noise::new(seed, choice));
            let draws = |i| (base.uniform(Purpose::Sample, i, 0), other.uniform(Purpose::Sample, i + step, index));
            let z = correlation((0..N).map(draws));
            assert!(z.abs() < 4.0, "{seed} {choice} {step} {index}: {z}");
        }
    }
}
