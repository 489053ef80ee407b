//! From lines of text to batches of tokens.

use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use tokenizers::{Tokenizer, TruncationParams};

use crate::Batch;

/// The sentences that are embedded where no file is given.
pub const SENTENCES: &str = include_str!("../sentences.txt");

/// Tokens after which a sentence is cut, as the model's own tokenizer does.
pub const LONGEST: usize = 128;

/// The sentences of a file, or [`SENTENCES`]: one a line, empty lines left out.
///
/// # Errors
/// Where the file cannot be read, or has none.
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

/// `sentences` in batches of at most `size`, in their order.
///
/// # Errors
/// Where `tokenizer` is no `tokenizer.json`, or refuses a sentence.
pub fn batches(tokenizer: &[u8], sentences: &[String], size: usize) -> Result<Vec<Batch>> {
    let failed = |error: tokenizers::Error| anyhow!("tokenizer.json: {error}");
    let mut tokenizer = Tokenizer::from_bytes(tokenizer).map_err(failed)?;
    // A batch is padded to its own longest sentence, not to the file's fixed length.
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
