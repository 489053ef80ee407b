//! Counts of cases that ran and of cases that a backend does not support.

use core::fmt;
use std::collections::BTreeMap;

/// Numbers of cases of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupCounts {
    /// Cases that ran.
    pub run: u64,
    /// Cases that the backend does not support.
    pub unsupported: u64,
}

/// Numbers of cases by group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally(BTreeMap<String, GroupCounts>);

impl Tally {
    /// Records a case of `group` that ran.
    pub(super) fn ran(&mut self, group: &str) {
        self.add(
            group,
            GroupCounts {
                run: 1,
                unsupported: 0,
            },
        );
    }

    /// Records a case of `group` that the backend does not support.
    pub(super) fn unsupported(&mut self, group: &str) {
        self.add(
            group,
            GroupCounts {
                run: 0,
                unsupported: 1,
            },
        );
    }

    pub(super) fn add(&mut self, group: &str, more: GroupCounts) {
        let counted = self.0.entry(group.to_owned()).or_default();
        counted.run += more.run;
        counted.unsupported += more.unsupported;
    }

    /// Returns the total counts of all groups.
    pub fn total(&self) -> GroupCounts {
        self.0
            .values()
            .fold(GroupCounts::default(), |total, counted| GroupCounts {
                run: total.run + counted.run,
                unsupported: total.unsupported + counted.unsupported,
            })
    }

    /// Encodes the tally as a line of text.
    pub fn encode(&self) -> String {
        let groups = self.0.iter();
        let words =
            groups.map(|(name, counted)| format!("{name}={}={}", counted.run, counted.unsupported));
        words.collect::<Vec<_>>().join("|")
    }

    /// Decodes a line that [`Tally::encode`] wrote.
    pub fn decode(text: &str) -> Option<Self> {
        let groups = text.split('|').map(|word| {
            let mut parts = word.split('=');
            let name = parts.next()?.to_owned();
            let run = parts.next()?.parse().ok()?;
            let unsupported = parts.next()?.parse().ok()?;
            Some((name, GroupCounts { run, unsupported }))
        });
        groups.collect::<Option<_>>().map(Self)
    }
}

/// A table of the tallies of several runs, with a row per group and backend and a column per kind
/// of run.
#[derive(Clone, Debug, Default)]
pub struct Table {
    runs: Vec<(String, String, Tally)>,
}

impl Table {
    /// Adds the tally of a run of `backend` to the column `column`.
    pub fn add(&mut self, backend: &str, column: &str, tally: Tally) {
        self.runs
            .push((backend.to_owned(), column.to_owned(), tally));
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "cases run on each rank (+ not supported)")?;
        let mut backends: Vec<&str> = self.runs.iter().map(|(name, ..)| name.as_str()).collect();
        backends.dedup();
        for backend in backends {
            let runs: Vec<_> = self
                .runs
                .iter()
                .filter(|(name, ..)| name == backend)
                .collect();
            write!(f, "{backend:<34}")?;
            for (_, column, _) in &runs {
                write!(f, "{column:>10}")?;
            }
            writeln!(f)?;
            let mut groups: Vec<&String> =
                runs.iter().flat_map(|(.., tally)| tally.0.keys()).collect();
            groups.sort();
            groups.dedup();
            let line = |f: &mut fmt::Formatter<'_>, name: &str, cells: Vec<GroupCounts>| {
                write!(f, "  {name:<32}")?;
                for cell in cells {
                    let text = match cell {
                        GroupCounts {
                            run: 0,
                            unsupported: 0,
                        } => "-".to_owned(),
                        GroupCounts {
                            run,
                            unsupported: 0,
                        } => run.to_string(),
                        GroupCounts { run, unsupported } => format!("{run}+{unsupported}"),
                    };
                    write!(f, "{text:>10}")?;
                }
                writeln!(f)
            };
            for group in groups {
                let cell = |tally: &Tally| tally.0.get(group).copied().unwrap_or_default();
                line(
                    f,
                    group,
                    runs.iter().map(|(.., tally)| cell(tally)).collect(),
                )?;
            }
            line(
                f,
                "all",
                runs.iter().map(|(.., tally)| tally.total()).collect(),
            )?;
        }
        Ok(())
    }
}
