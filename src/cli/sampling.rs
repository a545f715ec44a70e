//! Sampling flags that `complete` and `chat` share.

use crate::sample::params::SamplingParams;

/// What was asked for; the rest are the model's defaults. Ranges are checked with the request.
#[derive(Clone, Debug, Default, PartialEq, clap::Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingFlags {
    /// Tokens to generate at most [default: what the context leaves]
    #[arg(short = 'n', long, value_name = "N")]
    pub max_tokens: Option<u32>,
    /// 0 is greedy; from 0 to 2 [default: the model's]
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Keep the smallest set of tokens with this probability [default: the model's]
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Keep the K most likely tokens; 0 keeps all
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Drop tokens less likely than this share of the most likely one
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// From -2 to 2
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// From -2 to 2
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Above 0, at most 2; 1 is none
    #[arg(long, value_name = "X")]
    pub repetition_penalty: Option<f32>,
    /// The same seed gives the same text [default: another one each time]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Text that ends the answer and is not shown; repeatable
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
}

impl SamplingFlags {
    /// The flags over the model's defaults.
    #[must_use]
    pub fn over(&self, defaults: &SamplingParams) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            logit_bias: defaults.logit_bias.clone(),
            seed: self.seed.or(defaults.seed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_stand_over_the_models_defaults() {
        let defaults = SamplingParams { temperature: 0.6, top_p: 0.95, ..SamplingParams::default() };
        assert_eq!(SamplingFlags::default().over(&defaults), defaults);
        let flags = SamplingFlags { temperature: Some(0.0), seed: Some(7), ..SamplingFlags::default() };
        let got = flags.over(&defaults);
        assert_eq!((got.temperature, got.top_p, got.seed), (0.0, 0.95, Some(7)));
    }
}
