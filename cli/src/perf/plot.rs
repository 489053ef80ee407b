//! The chart: latency and bus bandwidth as functions of the size, with one series per operation.

use std::path::Path;

use anyhow::anyhow;
use plotters::prelude::*;

use super::operation::Kind;
use super::row::Row;
use super::usage;

/// Returns an error if the chart cannot be written to `path`, or if it would be empty.
pub(crate) fn check(path: &Path, operations: &[Kind]) -> anyhow::Result<()> {
    let shown = path.display();
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg") => {}
        Some("png") => {
            return Err(usage(format!(
                "--plot {shown}: charts are SVG; name a file that ends in .svg (a browser or \
                 rsvg-convert makes a PNG of it)"
            )));
        }
        _ => {
            return Err(usage(format!(
                "--plot {shown}: charts are SVG; name a file that ends in .svg"
            )));
        }
    }
    if operations.iter().all(|kind| kind.sizeless()) {
        let names: Vec<&str> = operations.iter().map(|kind| kind.name()).collect();
        return Err(usage(format!(
            "--plot {shown}: {} has no sizes to plot; --json has its times",
            names.join(", ")
        )));
    }
    Ok(())
}

/// Writes the chart of `rows` to an SVG file.
pub(crate) fn write(path: &Path, rows: &[Row]) -> anyhow::Result<()> {
    draw(path, rows).map_err(|error| anyhow!("{}: {error}", path.display()))
}

fn draw(path: &Path, rows: &[Row]) -> Result<(), Box<dyn core::error::Error>> {
    let rows: Vec<&Row> = rows.iter().filter(|row| row.bytes > 0).collect();
    if rows.is_empty() {
        return Err("no row has a size to plot".into());
    }
    let root = SVGBackend::new(path, (1100, 480)).into_drawing_area();
    root.fill(&WHITE)?;
    let halves = root.split_evenly((1, 2));
    let caption = format!(
        "{} ranks, {}, {}",
        rows[0].ranks, rows[0].device, rows[0].dtype
    );
    panel(
        &halves[0],
        &rows,
        &format!("Latency ({caption})"),
        "median time (us)",
        |row| row.median_us,
    )?;
    panel(
        &halves[1],
        &rows,
        &format!("Bandwidth ({caption})"),
        "bus bandwidth (GB/s)",
        |row| row.busbw_gbps,
    )?;
    root.present()?;
    Ok(())
}

fn panel(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    rows: &[&Row],
    caption: &str,
    label: &str,
    value: impl Fn(&Row) -> f64,
) -> Result<(), Box<dyn core::error::Error>> {
    let least = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::MAX, f64::min);
    let most = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::MIN, f64::max);
    let x = |row: &Row| row.bytes as f64;
    // A value may have been rounded to zero, which a logarithmic axis cannot show.
    let y = |row: &Row| value(row).max(1e-3);
    let (left, right) = (
        least(&mut rows.iter().map(|r| x(r))),
        most(&mut rows.iter().map(|r| x(r))),
    );
    // Ticks are at powers of the base. Every range must contain at least two ticks.
    let (base, left, right) = if right / left < 64.0 {
        (2.0, left / 2.0, right * 2.0)
    } else {
        (8.0, left, right * 1.5)
    };
    let decade = |value: f64, round: fn(f64) -> f64| 10f64.powf(round(value.log10()));
    let low = decade(least(&mut rows.iter().map(|r| y(r))), f64::floor);
    let high = decade(most(&mut rows.iter().map(|r| y(r))), f64::ceil).max(low * 10.0);
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(
            (left..right).log_scale().base(base),
            // The range is slightly larger, so that rounding does not remove the ticks at the ends
            // of the range.
            ((low * 0.999)..(high * 1.001)).log_scale(),
        )?;
    chart
        .configure_mesh()
        .x_desc("size (bytes)")
        .y_desc(label)
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 15))
        .x_label_formatter(&|bytes| size(*bytes))
        .y_label_formatter(&|value| number(*value))
        .light_line_style(WHITE.mix(0.0))
        .draw()?;
    let mut names: Vec<&str> = Vec::new();
    for row in rows {
        if !names.contains(&row.operation) {
            names.push(row.operation);
        }
    }
    for (index, name) in names.iter().enumerate() {
        let color = Palette99::pick(index).to_rgba();
        let points: Vec<(f64, f64)> = rows
            .iter()
            .filter(|row| row.operation == *name)
            .map(|row| (x(row), y(row)))
            .collect();
        chart
            .draw_series(LineSeries::new(points.clone(), color.stroke_width(2)))?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
        chart.draw_series(
            points
                .into_iter()
                .map(|point| Circle::new(point, 2, color.filled())),
        )?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 13))
        .draw()?;
    Ok(())
}

fn size(bytes: f64) -> String {
    match bytes {
        b if b >= (1u64 << 30) as f64 => format!("{:.3}G", b / (1u64 << 30) as f64),
        b if b >= (1 << 20) as f64 => format!("{:.3}M", b / (1 << 20) as f64),
        b if b >= 1024.0 => format!("{:.3}K", b / 1024.0),
        b => format!("{b:.3}"),
    }
    .replace(".000", "")
}

fn number(value: f64) -> String {
    if value >= 1.0 {
        format!("{value:.0}")
    } else {
        // Rounds the value, because powers of ten are not exact in binary.
        format!("{value:.6}").trim_end_matches('0').to_owned()
    }
}
