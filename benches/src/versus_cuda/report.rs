//! Rows of results, and their tables in Markdown and JSON.

use core::fmt::Write as _;

use serde::Serialize;

use super::benchmark::{AUTO, Figure, Mode, Side};
use super::costs::{Cost, barrier_name, signal_name};
use super::entries::Order;
use super::statistics::{Interval, median, ratio};

/// Results for one size or one number of tokens.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) ranks: usize,
    pub(crate) dtype: String,
    /// Bytes of a rank's input.
    pub(crate) bytes: usize,
    /// Number of tokens; 0 for an all-reduce.
    pub(crate) tokens: usize,
    /// Further numbers of a mixture of experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) moe: Option<MoeRow>,
    pub(crate) mode: Mode,
    /// Maximum number of blocks of a rank's grid.
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
    pub(crate) figures: Vec<Figure>,
}

/// Numbers of a row for a mixture of experts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct MoeRow {
    pub(crate) hidden: usize,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) layout: &'static str,
    pub(crate) payload: &'static str,
}

impl MoeRow {
    fn describe(&self) -> String {
        let Self {
            hidden,
            experts,
            top_k,
            layout,
            payload,
        } = self;
        format!("hidden {hidden}, top {top_k} of {experts}, {payload} payload, {layout}")
    }
}

impl Row {
    /// Returns the fastest timed candidate of a side.
    fn best(&self, side: Side) -> Option<&Figure> {
        let timed = self.figures.iter().filter(|figure| figure.side == side);
        timed
            .filter_map(|figure| Some((median(&figure.ns)?, figure)))
            .min_by(|(one, _), (other, _)| one.total_cmp(other))
            .map(|(_, figure)| figure)
    }

    /// Returns the timed candidate that uses the algorithm of Fusewire's plan.
    fn auto(&self, side: Side) -> Option<&Figure> {
        let mut figures = self.figures.iter().filter(|figure| figure.side == side);
        figures.find(|figure| figure.name.starts_with(AUTO) && !figure.ns.is_empty())
    }

    /// Returns the number of wrong elements of all candidates.
    pub(crate) fn wrong(&self) -> u64 {
        self.figures.iter().map(|figure| figure.wrong).sum()
    }

    /// Returns one line for the terminal.
    pub(crate) fn line(&self) -> String {
        let what = match (self.tokens, &self.moe) {
            (0, _) => human(self.bytes),
            (tokens, None) => format!("{tokens} tokens"),
            (tokens, Some(moe)) => format!("{}, {tokens} tokens", moe.describe()),
        };
        let figure = |side| {
            self.best(side).map_or_else(
                || "-".to_owned(),
                |figure| format!("{} {}", figure.name, us(median(&figure.ns))),
            )
        };
        let mut line = format!(
            "{} ranks, {}, {}, {what}: ours {}, C++ {}",
            self.ranks,
            self.dtype,
            self.mode.name(),
            figure(Side::Ours),
            figure(Side::Theirs)
        );
        for figure in self.figures.iter().filter(|figure| figure.wrong > 0) {
            let _ = write!(line, "; WRONG: {}, {} elements", figure.name, figure.wrong);
        }
        line
    }
}

/// All results of a run.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    /// Machine, programs and options.
    pub(crate) header: Vec<String>,
    #[serde(rename = "prices")]
    pub(crate) costs: Vec<Cost>,
    pub(crate) all_reduce: Vec<Row>,
    pub(crate) fused: Vec<Row>,
    pub(crate) moe: Vec<Row>,
}

impl Report {
    /// Returns all rows.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &Row> {
        self.all_reduce.iter().chain(&self.fused).chain(&self.moe)
    }

    fn cost(&self, name: &str, ranks: usize) -> Option<f64> {
        let cost = self
            .costs
            .iter()
            .find(|cost| cost.what == name && cost.ranks == ranks)?;
        median(&cost.values)
    }

    /// Returns the time in microseconds of a kernel's waits, computed from the measured costs. The
    /// cost of a signal was measured between two ranks.
    fn waits(&self, figure: &Figure, ranks: usize) -> Option<f64> {
        let (relaxed, release, ways) = figure.waits;
        let part = |count: u32, cost: Option<f64>| match count {
            0 => Some(0.0),
            _ => Some(f64::from(count) * cost?),
        };
        let barrier = |order| self.cost(&barrier_name(order), ranks);
        let way = self
            .cost(&signal_name(Order::Relaxed), 2)
            .map(|us| us / 2.0);
        Some(
            part(relaxed, barrier(Order::Relaxed))?
                + part(release, barrier(Order::Release))?
                + part(ways, way)?,
        )
    }

    /// Returns the tables.
    pub(crate) fn tables(&self) -> String {
        let mut text = String::new();
        if !self.costs.is_empty() {
            text += "### Costs\n\n| what | ranks | median | 95 % interval |\n|---|---|---|---|\n";
        }
        for cost in &self.costs {
            let middle = median(&cost.values).map_or_else(|| "-".to_owned(), digits);
            let range = cost.interval.map_or_else(
                || "-".to_owned(),
                |found| format!("{} to {}", digits(found.low), digits(found.high)),
            );
            let _ = writeln!(
                text,
                "| {} | {} | {middle} {} | {range} |",
                cost.what, cost.ranks, cost.unit
            );
        }
        for group in groups(&self.all_reduce) {
            let first = group[0];
            let _ = writeln!(
                text,
                "\n### All-reduce, {} ranks, {}, {}; {} blocks of {} threads at most\n",
                first.ranks,
                first.dtype,
                first.mode.name(),
                first.blocks,
                first.threads
            );
            text += "| bytes | auto us | best of ours us | best C++ us | auto / C++ | best / C++ | \
                copy us | of the copy's rate: ours, C++ | C++ waits us |\n";
            text += "|---|---|---|---|---|---|---|---|---|\n";
            for row in group {
                self.all_reduce_line(&mut text, row);
            }
        }
        for group in groups(&self.fused) {
            let first = group[0];
            let _ = writeln!(
                text,
                "\n### All-reduce + residual + RMSNorm, {} ranks, {}, {}; {} blocks of {} threads \
                    at most\n",
                first.ranks,
                first.dtype,
                first.mode.name(),
                first.blocks,
                first.threads
            );
            text += "| tokens | fused us | ours apart us | C++ fused us | C++ apart us | fused / \
                C++ fused | fused / C++ apart | fused / ours apart |\n";
            text += "|---|---|---|---|---|---|---|---|\n";
            for row in group {
                fused_line(&mut text, row);
            }
        }
        for group in groups(&self.moe) {
            let first = group[0];
            let _ = writeln!(
                text,
                "\n### Mixture of experts, {} ranks, {}, {}; {} blocks of {} threads at most\n",
                first.ranks,
                first
                    .moe
                    .as_ref()
                    .map_or_else(String::new, MoeRow::describe),
                first.mode.name(),
                first.blocks,
                first.threads
            );
            text += "| tokens | ours us | C++ us | ours / C++ | dispatch: ours, C++ us | ours / \
                C++ | combine: ours, C++ us | ours / C++ |\n";
            text += "|---|---|---|---|---|---|---|---|\n";
            for row in group {
                moe_line(&mut text, row);
            }
        }
        let left: Vec<String> = self
            .rows()
            .flat_map(|row| {
                let wrong = row.figures.iter().filter(|figure| figure.wrong > 0);
                wrong.map(|figure| format!("{}: {}", row.line(), figure.name))
            })
            .collect();
        if !left.is_empty() {
            text += "\n### Wrong results, which are in no table\n\n";
            for line in left {
                let _ = writeln!(text, "- {line}");
            }
        }
        text
    }

    fn all_reduce_line(&self, text: &mut String, row: &Row) {
        let theirs = row.best(Side::Theirs);
        let (auto, ours) = (row.auto(Side::Ours), row.best(Side::Ours));
        let copy = row.best(Side::Floor).and_then(|figure| median(&figure.ns));
        let waits = theirs.and_then(|figure| self.waits(figure, row.ranks));
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} | {}, {} | {} |",
            human(row.bytes),
            named(auto),
            named(ours),
            named(theirs),
            quotient(auto, theirs),
            quotient(ours, theirs),
            us(copy),
            share(copy, ours),
            share(copy, theirs),
            waits.map_or_else(|| "-".to_owned(), digits)
        );
    }
}

fn fused_line(text: &mut String, row: &Row) {
    let ours = row.best(Side::Ours);
    let (theirs, apart) = (row.best(Side::Theirs), row.best(Side::TheirsApart));
    let own_apart = row.best(Side::OursApart);
    let _ = writeln!(
        text,
        "| {} | {} | {} | {} | {} | {} | {} | {} |",
        row.tokens,
        us(ours.and_then(|figure| median(&figure.ns))),
        named(own_apart),
        named(theirs),
        named(apart),
        quotient(ours, theirs),
        quotient(ours, apart),
        quotient(ours, own_apart)
    );
}

fn moe_line(text: &mut String, row: &Row) {
    let (ours, theirs) = (row.best(Side::Ours), row.best(Side::Theirs));
    let _ = write!(
        text,
        "| {} | {} | {} | {} |",
        row.tokens,
        us(ours.and_then(|figure| median(&figure.ns))),
        named(theirs),
        quotient(ours, theirs)
    );
    for step in 0..2 {
        // The candidates are those of the first columns.
        let of_step = |figure: Option<&Figure>| {
            let ns = figure?.steps_ns.get(step)?.clone();
            Some(Figure {
                ns,
                ..figure?.clone()
            })
        };
        let (ours, theirs) = (of_step(ours), of_step(theirs));
        let middle =
            |figure: &Option<Figure>| us(figure.as_ref().and_then(|figure| median(&figure.ns)));
        let _ = write!(
            text,
            " {}, {} | {} |",
            middle(&ours),
            middle(&theirs),
            quotient(ours.as_ref(), theirs.as_ref())
        );
    }
    text.push('\n');
}

/// Groups the rows by table and keeps their order.
fn groups(rows: &[Row]) -> Vec<Vec<&Row>> {
    let mut groups: Vec<Vec<&Row>> = Vec::new();
    let key = |row: &Row| {
        let moe = row.moe.clone();
        (row.ranks, row.dtype.clone(), row.mode == Mode::Graph, moe)
    };
    for row in rows {
        match groups.iter_mut().find(|group| key(group[0]) == key(row)) {
            Some(group) => group.push(row),
            None => groups.push(vec![row]),
        }
    }
    groups
}

fn named(figure: Option<&Figure>) -> String {
    figure.map_or_else(
        || "-".to_owned(),
        |figure| {
            let name = figure.name.strip_prefix("auto: ").unwrap_or(&figure.name);
            format!("{} ({name})", us(median(&figure.ns)))
        },
    )
}

fn quotient(over: Option<&Figure>, under: Option<&Figure>) -> String {
    let found: Option<Interval> = over
        .zip(under)
        .and_then(|(over, under)| ratio(&over.ns, &under.ns));
    match (found, over, under) {
        (Some(found), ..) => format!("{:.2} [{:.2}, {:.2}]", found.median, found.low, found.high),
        // With too few rounds for an interval, only the ratio of the medians is shown.
        (None, Some(over), Some(under)) => median(&over.ns).zip(median(&under.ns)).map_or_else(
            || "-".to_owned(),
            |(over, under)| format!("{:.2}", over / under),
        ),
        _ => "-".to_owned(),
    }
}

/// Returns the rate of `figure` as a percentage of the rate of the copy.
fn share(copy: Option<f64>, figure: Option<&Figure>) -> String {
    let taken = figure.and_then(|figure| median(&figure.ns));
    copy.zip(taken).map_or_else(
        || "-".to_owned(),
        |(copy, taken)| format!("{:.0} %", 100.0 * copy / taken),
    )
}

fn us(ns: Option<f64>) -> String {
    ns.map_or_else(|| "-".to_owned(), |ns| digits(ns / 1000.0))
}

/// Formats a number with three significant digits, or with all digits before the decimal point.
fn digits(value: f64) -> String {
    match value.abs() {
        ..10.0 => format!("{value:.2}"),
        10.0..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
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
    use super::super::costs::Cost;
    use super::*;

    fn figure(name: &str, side: Side, ns: f64, waits: (u32, u32, u32)) -> Figure {
        Figure {
            name: name.to_owned(),
            side,
            waits,
            ns: (0..11).map(|round| ns + f64::from(round)).collect(),
            steps_ns: Vec::new(),
            left_out: None,
            wrong: 0,
        }
    }

    fn row(figures: Vec<Figure>, tokens: usize) -> Row {
        Row {
            ranks: 4,
            dtype: "bf16".to_owned(),
            bytes: 8192,
            tokens,
            moe: None,
            mode: Mode::Graph,
            blocks: 32,
            threads: 512,
            figures,
        }
    }

    fn cost(what: String, ranks: usize, us: f64) -> Cost {
        Cost {
            what,
            ranks,
            unit: "us",
            values: vec![us; 11],
            interval: super::super::statistics::interval(&[us; 11]),
        }
    }

    #[test]
    fn a_table_has_ratios_of_the_best_and_of_the_plan() {
        let report = Report {
            costs: vec![cost(barrier_name(Order::Relaxed), 4, 1.5)],
            all_reduce: vec![row(
                vec![
                    figure("auto: two_shot", Side::Ours, 4000.0, (0, 0, 0)),
                    figure("signal", Side::Ours, 3000.0, (0, 0, 0)),
                    figure("one_stage", Side::Theirs, 2000.0, (2, 0, 0)),
                    figure("two_stage_push", Side::Theirs, 5000.0, (1, 1, 0)),
                    figure("copy", Side::Floor, 500.0, (0, 0, 0)),
                ],
                0,
            )],
            ..Report::default()
        };
        let text = report.tables();
        let line = "| 8 KiB | 4.00 (two_shot) | 3.00 (signal) | 2.00 (one_stage) | 2.00 [2.00, \
            2.00] | 1.50 [1.50, 1.50] | 0.51 | 17 %, 25 % | 3.00 |";
        assert!(text.contains(line), "{text}");
        assert!(
            text.contains("| barrier, relaxed | 4 | 1.50 us | 1.50 to 1.50 |"),
            "{text}"
        );
        let json = serde_json::to_string(&report).expect("JSON");
        assert!(
            json.contains("\"side\":\"theirs\"") && json.contains("\"mode\":\"graph\""),
            "{json}"
        );
    }

    #[test]
    fn wrong_candidates_are_named_and_have_no_time() {
        let mut broken = figure("one_stage", Side::Theirs, 1.0, (2, 0, 0));
        broken.ns.clear();
        broken.wrong = 7;
        let ours = figure("auto: signal", Side::Ours, 1000.0, (0, 0, 0));
        let row = row(vec![ours, broken], 0);
        assert_eq!(row.wrong(), 7);
        assert!(row.line().contains("C++ -") && row.line().contains("WRONG: one_stage, 7"));
        let report = Report {
            all_reduce: vec![row],
            ..Report::default()
        };
        let text = report.tables();
        assert!(text.contains("| - | - | - | - | -, - | - |"), "{text}");
        assert!(text.contains("Wrong results"), "{text}");
    }

    #[test]
    fn fused_rows_compare_one_launch_with_two() {
        let report = Report {
            fused: vec![row(
                vec![
                    figure("fused", Side::Ours, 6000.0, (0, 0, 0)),
                    figure(
                        "auto: signal, then norm_alone",
                        Side::OursApart,
                        9000.0,
                        (0, 0, 0),
                    ),
                    figure("norm_by_packets", Side::Theirs, 6000.0, (0, 0, 1)),
                    figure(
                        "one_stage, then norm_alone",
                        Side::TheirsApart,
                        12000.0,
                        (2, 0, 0),
                    ),
                ],
                16,
            )],
            ..Report::default()
        };
        let text = report.tables();
        let line = "| 16 | 6.00 | 9.01 (signal, then norm_alone) | 6.00 (norm_by_packets) | 12.0 \
            (one_stage, then norm_alone) | 1.00 [1.00, 1.00] | 0.50 [0.50, 0.50] | 0.67 [0.67, \
            0.67] |";
        assert!(text.contains(line), "{text}");
    }

    #[test]
    fn rows_of_experts_have_the_times_of_both_steps() {
        let split = |name, side, ns, steps: [f64; 2]| Figure {
            steps_ns: steps.map(|ns| vec![ns; 11]).to_vec(),
            ..figure(name, side, ns, (0, 0, 0))
        };
        let figures = vec![
            split("dispatch, combine", Side::Ours, 9000.0, [4000.0, 6000.0]),
            split("slow", Side::Theirs, 20000.0, [1.0, 1.0]),
            split("fast", Side::Theirs, 18000.0, [8000.0, 6000.0]),
        ];
        let moe = |layout| MoeRow {
            hidden: 7168,
            experts: 256,
            top_k: 8,
            layout,
            payload: "bf16",
        };
        let of_layout = |layout| Row {
            moe: Some(moe(layout)),
            ..row(figures.clone(), 64)
        };
        let report = Report {
            moe: vec![of_layout("rank-major"), of_layout("expert-major")],
            ..Report::default()
        };
        let text = report.tables();
        let line = "| 64 | 9.01 | 18.0 (fast) | 0.50 [0.50, 0.50] | 4.00, 8.00 | 0.50 [0.50, \
            0.50] | 6.00, 6.00 | 1.00 [1.00, 1.00] |";
        assert_eq!(text.matches(line).count(), 2, "{text}");
        let title = "### Mixture of experts, 4 ranks, hidden 7168, top 8 of 256, bf16 payload, \
            expert-major, graph; 32 blocks of 512 threads at most";
        assert!(text.contains(title), "{text}");
        let line = of_layout("rank-major").line();
        assert!(
            line.contains("rank-major, 64 tokens: ours dispatch, combine 9.01"),
            "{line}"
        );
    }
}
