//! Tables of medians and ratios, printed and written to a file.

use core::fmt::Write as _;

use super::{Arguments, BEFORE, Candidate, Sample};
use crate::document::Header;
use crate::machine::{self, NEAR_NS, Rate};

/// Returns the header of a run.
pub(super) fn header(candidates: &[Candidate], arguments: &Arguments) -> Header {
    let rounds = arguments.rounds;
    let cores = machine::cores().map_or(0, |cores| cores.len());
    let mut lines = vec![
        format!(
            "{}; {cores} core(s); Linux {}",
            machine::processor(),
            machine::kernel()
        ),
        format!(
            "{rounds} rounds, in each every peer once, in alternating order; float32 sum, out \
             of place; barrier, clock, call, clock; rank 0's median of a run, then the median \
             of the runs"
        ),
        match arguments.unpinned {
            false => "rank r pinned to core r mod cores".to_owned(),
            true => "ranks not pinned".to_owned(),
        } + "; all results verified on all ranks",
    ];
    if arguments.busy > 0 {
        lines.push(format!(
            "{} thread(s) that compute meanwhile, on any core (--busy)",
            arguments.busy
        ));
    }
    if arguments.touch {
        lines.push("inputs rewritten and outputs read between calls (--touch)".to_owned());
    }
    if arguments.before.is_some() {
        lines.push("\"before\": another build of this program (--before)".to_owned());
    }
    for candidate in candidates {
        if let Candidate::Mpi(mpi) = candidate {
            lines.push(format!("{}: {}", mpi.name, mpi.settings()));
        }
    }
    Header::of(lines)
}

/// State of the machine during a run, by which samples are grouped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Near,
    Far,
    Changing,
}

impl State {
    fn of(sample: &Sample) -> Self {
        match sample.ping_pong {
            [Some(before), Some(after)] if before < NEAR_NS && after < NEAR_NS => Self::Near,
            [Some(before), Some(after)] if before < NEAR_NS || after < NEAR_NS => Self::Changing,
            _ => Self::Far,
        }
    }

    fn describe(self) -> &'static str {
        match self {
            Self::Near => "ping-pong below 100 ns (the state that counts)",
            Self::Far => "ping-pong of 100 ns or more",
            Self::Changing => "changing",
        }
    }
}

/// Returns all tables of a run.
pub(crate) fn tables(
    candidates: &[Candidate],
    ranks: &[usize],
    samples: &[Sample],
    rates: &[Vec<Rate>],
) -> String {
    let mut text = String::new();
    let pings = samples.iter().flat_map(|sample| sample.ping_pong).flatten();
    let mut pings: Vec<f64> = pings.collect();
    pings.sort_unstable_by(f64::total_cmp);
    if let (Some(least), Some(most)) = (pings.first(), pings.last()) {
        let _ = writeln!(
            text,
            "Cache-line ping-pong, two lines, one way: median {:.0} ns, {least:.0} to {most:.0} \
                ns.\n",
            pings[pings.len() / 2]
        );
    }
    text += "| GB/s, median of the rounds | 1 core | 2 cores |\n|---|---|---|\n";
    for index in 0..rates.first().map_or(0, Vec::len) {
        let middle = |of: fn(&Rate) -> f64| {
            let mut all: Vec<f64> = rates.iter().map(|rates| of(&rates[index])).collect();
            all.sort_unstable_by(f64::total_cmp);
            all[all.len() / 2]
        };
        let (one, two) = (middle(|rate| rate.one), middle(|rate| rate.two));
        let _ = writeln!(text, "| {} | {one:.1} | {two:.1} |", rates[0][index].name);
    }
    for &ranks in ranks {
        let of_ranks = || samples.iter().filter(|sample| sample.ranks == ranks);
        let changing = of_ranks().filter(|sample| State::of(sample) == State::Changing);
        let changing = changing.count();
        for state in [State::Near, State::Far] {
            let chosen: Vec<&Sample> = of_ranks()
                .filter(|sample| State::of(sample) == state)
                .collect();
            if chosen.is_empty() {
                continue;
            }
            let _ = writeln!(text, "\n### {ranks} ranks, {}\n", state.describe());
            let runs: Vec<_> = (0..candidates.len())
                .map(|who| chosen.iter().filter(|sample| sample.who == who).count())
                .map(|runs| runs.to_string())
                .collect();
            let names: Vec<_> = candidates.iter().map(Candidate::name).collect();
            let _ = writeln!(
                text,
                "Median us; runs of {}: {}.\n",
                names.join(", "),
                runs.join(", ")
            );
            text += &table(candidates, &chosen, |all| all[all.len() / 2]);
            let _ = writeln!(text, "\nThe fastest run's median, us:\n");
            text += &table(candidates, &chosen, |all| all[0]);
        }
        if changing > 0 {
            let _ = writeln!(
                text,
                "\n{changing} run(s) of {ranks} ranks are in no table: the state changed during \
                    them."
            );
        }
    }
    text
}

/// Returns one table. `pick` chooses from the sorted medians of a candidate's runs.
fn table(candidates: &[Candidate], samples: &[&Sample], pick: fn(&[u64]) -> u64) -> String {
    let mut text = String::from("| bytes |");
    for candidate in candidates {
        let _ = write!(text, " {} |", candidate.name());
    }
    text += " registered / best MPI | staged / Open MPI | registered / bare |";
    // The kinds that were also run with an earlier program.
    let compared: Vec<_> = candidates
        .iter()
        .filter_map(|candidate| candidate.name().strip_suffix(BEFORE))
        .collect();
    for kind in &compared {
        let _ = write!(text, " {kind} / before |");
    }
    text += " missed |\n|---";
    text += &"|---".repeat(candidates.len() + compared.len() + 4);
    text += "|\n";
    let sizes = samples.iter().map(|sample| sample.figures.len()).max();
    for index in 0..sizes.unwrap_or(0) {
        let mut bytes = 0;
        let medians: Vec<Option<u64>> = (0..candidates.len())
            .map(|who| {
                let mut all: Vec<u64> = samples
                    .iter()
                    .filter(|sample| sample.who == who)
                    .filter_map(|sample| sample.figures.get(index))
                    .map(|figure| {
                        bytes = figure.bytes;
                        figure.median_ns
                    })
                    .collect();
                all.sort_unstable();
                (!all.is_empty()).then(|| pick(&all))
            })
            .collect();
        let of = |name: &str| {
            let who = candidates
                .iter()
                .position(|candidate| candidate.name() == name)?;
            medians[who].map(|ns| ns as f64)
        };
        let best = candidates
            .iter()
            .zip(&medians)
            .filter(|(candidate, _)| matches!(candidate, Candidate::Mpi(_)))
            .filter_map(|(_, median)| median.map(|ns| ns as f64))
            .min_by(f64::total_cmp);
        let ratio = |value: Option<f64>, base: Option<f64>| Some(value? / base?);
        let registered = ratio(of("registered"), best);
        // Staged operations are compared with Open MPI or, if Open MPI was not run, with the best
        // MPI.
        let open = candidates
            .iter()
            .position(|candidate| candidate.name().starts_with("Open MPI"))
            .map_or(best, |who| medians[who].map(|ns| ns as f64));
        let staged = ratio(of("staged"), open);
        let bare = ratio(of("registered"), of("bare"));
        let _ = write!(text, "| {} |", human(bytes));
        for median in &medians {
            let _ = write!(text, " {} |", microseconds(*median));
        }
        let to_before = compared
            .iter()
            .map(|kind| ratio(of(kind), of(&format!("{kind}{BEFORE}"))));
        for ratio in [registered, staged, bare].into_iter().chain(to_before) {
            match ratio {
                Some(ratio) => {
                    let _ = write!(text, " {ratio:.2} |");
                }
                None => text += " - |",
            }
        }
        let _ = writeln!(text, " {} |", missed(bytes, registered, staged, bare));
    }
    text
}

/// Lists the targets that a row of the table misses.
fn missed(bytes: usize, registered: Option<f64>, staged: Option<f64>, bare: Option<f64>) -> String {
    let parity = if bytes <= 1 << 10 { 1.1 } else { 1.0 };
    let goal = if bytes >= 64 << 10 { 0.5 } else { parity };
    let floor = if bytes >= 64 << 20 {
        1.25
    } else {
        f64::INFINITY
    };
    let goals = [
        ("registered", registered, goal),
        ("staged", staged, parity),
        ("bare", bare, floor),
    ];
    let missed: Vec<_> = goals
        .into_iter()
        .filter(|(_, ratio, goal)| ratio.is_some_and(|ratio| ratio > *goal))
        .map(|(name, _, goal)| format!("{name} > {goal}"))
        .collect();
    missed.join(", ")
}

fn microseconds(ns: Option<u64>) -> String {
    let Some(ns) = ns else {
        return "-".to_owned();
    };
    let us = ns as f64 / 1000.0;
    match us {
        ..10.0 => format!("{us:.2}"),
        10.0..1000.0 => format!("{us:.1}"),
        _ => format!("{us:.0}"),
    }
}

fn human(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{} KiB", bytes as f64 / 1024.0),
        _ => format!("{} MiB", bytes as f64 / 1_048_576.0),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::children::Figure;

    /// Returns the lines of the table of these candidates, each with the medians of its runs for a
    /// size of 8 bytes.
    fn table_of(runs: &[(&str, &[u64])]) -> Vec<String> {
        let own = |name: &str| Candidate::Own {
            name: name.to_owned(),
            kind: "registered",
            program: PathBuf::new(),
        };
        let candidates: Vec<_> = runs.iter().map(|(name, _)| own(name)).collect();
        let sample = |who: usize, median_ns: u64| Sample {
            ranks: 2,
            who,
            ping_pong: [None; 2],
            figures: vec![Figure {
                bytes: 8,
                median_ns,
                wrong: 0,
            }],
        };
        let samples: Vec<_> = runs
            .iter()
            .enumerate()
            .flat_map(|(who, (_, medians))| medians.iter().map(move |&ns| sample(who, ns)))
            .collect();
        let samples: Vec<_> = samples.iter().collect();
        let text = table(&candidates, &samples, |all| all[all.len() / 2]);
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn the_table_has_the_ratios_to_an_earlier_program() {
        let table = table_of(&[
            ("registered", &[900, 3000, 1000]),
            ("registered before", &[2000]),
            ("staged", &[3000]),
            ("staged before", &[]),
            ("bare", &[1000]),
        ]);
        assert_eq!(
            table,
            [
                "| bytes | registered | registered before | staged | staged before | bare \
                 | registered / best MPI | staged / Open MPI | registered / bare \
                 | registered / before | staged / before | missed |",
                "|---|---|---|---|---|---|---|---|---|---|---|---|",
                "| 8 B | 1.00 | 2.00 | 3.00 | - | 1.00 | - | - | 1.00 | 0.50 | - |  |",
            ]
        );
    }

    #[test]
    fn without_an_earlier_program_the_table_has_no_ratios_to_it() {
        let table = table_of(&[("registered", &[1000]), ("staged", &[3000])]);
        assert!(!table[0].contains("before"), "{}", table[0]);
        assert_eq!(table[1].matches("---").count(), 7);
    }
}
