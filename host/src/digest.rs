//! Digests that ranks compare. They depend neither on the compiler nor on the machine, so ranks
//! whose programs were built differently agree.

const SEED: u64 = 0x517c_c1b7_2722_0a95;

/// Adds `word` to a digest.
pub(crate) const fn mixed(digest: u64, word: u64) -> u64 {
    (digest ^ word)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .rotate_left(23)
}

/// Returns the digest of `words`.
pub(crate) fn of_words(words: &[u64]) -> u64 {
    words.iter().fold(SEED, |digest, word| mixed(digest, *word))
}

/// Returns the digest of `text`.
pub(crate) fn of_text(text: &str) -> u64 {
    let length = mixed(SEED, text.len() as u64);
    text.bytes()
        .fold(length, |digest, byte| mixed(digest, u64::from(byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values are those of another implementation, in Python.
    #[test]
    fn digests_are_those_of_every_other_build() {
        assert_eq!(of_words(&[]), SEED);
        assert_eq!(of_words(&[1, 2, u64::MAX]), 0xda61_7811_a34a_4af7);
        assert_eq!(of_text("fusewire/world/0"), 0x5744_5f60_4f2f_5266);
    }

    #[test]
    fn digests_of_similar_words_differ() {
        let all = [
            of_words(&[0]),
            of_words(&[0, 0]),
            of_words(&[1]),
            of_words(&[]),
        ];
        for (at, digest) in all.iter().enumerate() {
            assert!(!all[..at].contains(digest), "{all:x?}");
        }
    }
}
