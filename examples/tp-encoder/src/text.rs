//! Conversion of lines of text to batches of tokens.

use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use tokenizers::{Tokenizer, TruncationParams};

use crate::Batch;

/// Sentences that are embedded by default.
pub const SENTENCES: &str = include_str!("../sentences.txt");

/// Maximum number of tokens of a sentence, as in the model's tokenizer. Longer sentences are
/// truncated.
pub const LONGEST: usize = 128;

/// Reads the sentences of `file`, or of [`SENTENCES`]: one per line, without empty lines.
///
/// # Errors
/// Fails if the file cannot be read or contains no sentence.
pub fn sentences(file: Option<&Path>) -> Result<Vec<String>> {
    let text = match file {
        Some(file) => std::fs::read_to_string(file)
            .with_context(|| format!("the text file {}", file.display()))?,
        None => SENTENCES.to_owned(),
    };
    let lines: Vec<String> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .map(str::to_owned)
        .collect();
    ensure!(
        !lines.is_empty(),
        "the text has no sentence: one a line is needed"
    );
    Ok(lines)
}

/// Converts `sentences` to batches of at most `size`, in order.
///
/// # Errors
/// Fails if `tokenizer` is not a valid `tokenizer.json` or cannot encode a sentence.
pub fn batches(tokenizer: &[u8], sentences: &[String], size: usize) -> Result<Vec<Batch>> {
    let failed = |error: tokenizers::Error| anyhow!("tokenizer.json: {error}");
    let mut tokenizer = Tokenizer::from_bytes(tokenizer).map_err(failed)?;
    // Disables padding to the fixed length in the file. `Batch` pads to its longest sentence
    // instead.
    tokenizer.with_padding(None);
    let truncation = TruncationParams {
        max_length: LONGEST,
        ..TruncationParams::default()
    };
    tokenizer
        .with_truncation(Some(truncation))
        .map_err(failed)?;
    sentences
        .chunks(size.max(1))
        .map(|chunk| {
            let ids = chunk
                .iter()
                .map(|line| Ok(tokenizer.encode(line.as_str(), true)?.get_ids().to_vec()))
                .collect::<Result<Vec<_>, _>>()
                .map_err(failed)?;
            Ok(Batch::new(&ids))
        })
        .collect()
}
