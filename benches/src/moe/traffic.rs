//! Rows and bytes that a dispatch sends, and the numbers that uniform routing predicts.

use core::fmt::Write as _;

use anyhow::Result;

use super::case::Case;
use super::routing::Routing;

/// Rows and bytes that the ranks send in a dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Rows that all ranks have received.
    pub(crate) rows: u64,
    /// Bytes of a row.
    pub(crate) row_bytes: u64,
    /// Bytes of announcements and signals, or of counts, that a rank sends.
    pub(crate) other_bytes: u64,
}

/// Returns a table of the rows and bytes of each case.
pub(super) fn table<'a>(
    routing: &Routing,
    ranks: u32,
    cases: impl Iterator<Item = (&'a Case, &'a [(String, Traffic)])>,
) -> Result<String> {
    let mut text = String::from(
        "A rank sends to all ranks, itself included, in a dispatch (mean of the ranks). Expected: \
         tokens * ranks of a token * bytes of a row, where the ranks of a token are those of \
         uniform routing. Other bytes are announcements and signals of Fusewire, and counts of \
         MPI.\n\n\
         | | hidden | payload | tokens | copies per token: measured / expected | bytes of a row | \
         other bytes | bytes: measured / expected |\n\
         |---|---|---|---|---|---|---|---|\n",
    );
    let expected = (!routing.skewed && routing.experts.is_multiple_of(ranks))
        .then(|| routing.expected_ranks(ranks));
    let mut seen = Vec::new();
    for (case, all) in cases {
        // The layout of the results does not change what is sent.
        let sent = (case.hidden, case.payload, case.tokens);
        if seen.contains(&sent) {
            continue;
        }
        seen.push(sent);
        for (name, traffic) in all {
            let tokens = case.tokens as f64;
            let copies = traffic.rows as f64 / (tokens * f64::from(ranks));
            let row = traffic.row_bytes as f64;
            let bytes = tokens * copies * row + traffic.other_bytes as f64;
            let (of_ranks, of_bytes) = expected.map_or_else(
                || ("-".to_owned(), "-".to_owned()),
                |expected| {
                    (
                        format!("{expected:.3}"),
                        format!("{:.0}", tokens * expected * row),
                    )
                },
            );
            writeln!(
                text,
                "| {name} | {} | {} | {} | {copies:.3} / {of_ranks} | {} | {} | {bytes:.0} / \
                 {of_bytes} |",
                case.hidden,
                case.payload_name(),
                case.tokens,
                traffic.row_bytes,
                traffic.other_bytes
            )?;
        }
    }
    Ok(text)
}
