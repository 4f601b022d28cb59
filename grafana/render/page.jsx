// Draws one dashboard with Grafana's own UI components (@grafana/ui): what a panel's plugin does, for the panels we use.
// /picture.json has the dashboard, the data that Prometheus answered, and the time range; see picture.py.

import { createRoot } from 'react-dom/client';
import { useLayoutEffect, useState } from 'react';
import { lastValueFrom } from 'rxjs';

// Not `import`: bundled as modules, the default exports of what @grafana/ui uses would be taken for objects around them.
const {
  applyFieldOverrides, createTheme, dateTime, FieldConfigOptionsRegistry, FieldType, getDisplayValueAlignmentFactors,
  getFieldDisplayValues, identityOverrideProcessor, renderLegendFormat, renderTextPanelMarkdown, standardEditorsRegistry,
  standardFieldConfigEditorRegistry, standardTransformers, standardTransformersRegistry, ThemeContext,
  thresholdsOverrideProcessor, toDataFrame, transformDataFrame, unitOverrideProcessor,
} = require('@grafana/data');
const { BarGauge, BigValue, GlobalStyles, PanelChrome, PortalContainer, Table, TimeSeries, VizRepeater } = require('@grafana/ui');

const COLUMN = 60; // pixels; a dashboard has 24 columns
const ROW = 38;
const GAP = 8;
const theme = createTheme({ colors: { mode: 'dark' } });
const asIs = (text) => text;

// The settings of a field that our dashboards use. The server registers all that there are; a setting outside this list
// would not be drawn, so it is refused (see `unknownSettings`).
const STANDARD = ['unit', 'min', 'max', 'decimals', 'displayName', 'noValue', 'color', 'mappings', 'thresholds'];
const CUSTOM = [
  'drawStyle', 'lineWidth', 'fillOpacity', 'showPoints', 'stacking', 'lineStyle', 'axisSoftMin', 'axisSoftMax', 'minWidth',
  'align', 'inspect', 'width',
];
const PROCESS = { unit: unitOverrideProcessor, thresholds: thresholdsOverrideProcessor };
const property = (id, isCustom) => ({
  id: isCustom ? `custom.${id}` : id, path: id, name: id, isCustom, editor: () => null, override: () => null,
  process: PROCESS[id] ?? identityOverrideProcessor, shouldApply: (field) => field.type !== FieldType.time, settings: {},
});
const properties = [...STANDARD.map((id) => property(id, false)), ...CUSTOM.map((id) => property(id, true))];
const registry = new FieldConfigOptionsRegistry(() => properties);
standardFieldConfigEditorRegistry.setInit(() => properties.filter((one) => !one.isCustom));
standardEditorsRegistry.setInit(() => []);
standardTransformersRegistry.setInit(() => ['mergeTransformer', 'organizeFieldsTransformer'].map((name) => {
  const transformation = standardTransformers[name];
  return { id: transformation.id, name, transformation, editor: () => null };
}));

function unknownSettings(panel) {
  const { defaults = {}, overrides = [] } = panel.fieldConfig ?? {};
  const { custom = {}, ...standard } = defaults;
  const used = [
    ...Object.keys(standard), ...Object.keys(custom).map((id) => `custom.${id}`),
    ...overrides.flatMap((one) => one.properties.map((setting) => setting.id)),
  ];
  return used.filter((id) => !registry.getIfExists(id));
}

// Of each series that a query returned, a frame of time and value, named as the query's legend says.
const seriesFrames = (answers) => answers.map(({ refId, legend, labels, times, values }) => toDataFrame({
  refId,
  fields: [
    { name: 'Time', type: FieldType.time, values: times, config: {} },
    {
      name: 'Value', type: FieldType.number, values, labels,
      config: legend ? { displayNameFromDS: renderLegendFormat(legend, labels) } : {},
    },
  ],
}));

// Of each query, a frame with a row for each series: time, labels and value, named as the Prometheus data source does it.
function tableFrames(panel, answers) {
  return panel.targets.map(({ refId }) => {
    const rows = answers.filter((answer) => answer.refId === refId);
    const labels = [...new Set(rows.flatMap((row) => Object.keys(row.labels)))];
    return toDataFrame({
      refId,
      fields: [
        { name: 'Time', type: FieldType.time, values: rows.map((row) => row.times[0]), config: {} },
        ...labels.map((name) => ({
          name, type: FieldType.string, values: rows.map((row) => row.labels[name] ?? ''), config: {},
        })),
        {
          name: panel.targets.length > 1 ? `Value #${refId}` : 'Value', type: FieldType.number,
          values: rows.map((row) => row.values[0]), config: {},
        },
      ],
    });
  });
}

async function framesOf(panel, answers) {
  const asked = panel.type === 'table' ? tableFrames(panel, answers) : seriesFrames(answers);
  const frames = await lastValueFrom(transformDataFrame(panel.transformations ?? [], asked));
  const fieldConfig = { defaults: {}, overrides: [], ...panel.fieldConfig };
  return applyFieldOverrides({ data: frames, fieldConfig, fieldConfigRegistry: registry, replaceVariables: asIs, theme });
}

function displayValues(panel, frames, sparkline) {
  return getFieldDisplayValues({
    data: frames, fieldConfig: panel.fieldConfig, reduceOptions: panel.options.reduceOptions, replaceVariables: asIs, sparkline,
    theme,
  });
}

function Stat({ panel, frames, width, height }) {
  const { colorMode, graphMode, justifyMode, textMode } = panel.options;
  return displayValues(panel, frames, graphMode !== 'none').map(({ display, sparkline }, index) => (
    <BigValue key={index} {...{ width, height, colorMode, graphMode, justifyMode, textMode, sparkline, theme }} value={display} />
  ));
}

function Bars({ panel, frames, width, height }) {
  const { orientation, displayMode, showUnfilled, valueMode } = panel.options;
  const draw = ({ value, alignmentFactors, width, height }) => (
    <BarGauge
      {...{ alignmentFactors, displayMode, height, orientation, showUnfilled, theme, width }} value={value.display}
      display={value.view?.getFieldDisplayProcessor(value.colIndex)} field={value.field} valueDisplayMode={valueMode} text={{}}
      isOverflow={false}
    />
  );
  return (
    <VizRepeater
      getValues={() => displayValues(panel, frames, false)} getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderCounter={1} source={frames} {...{ width, height, orientation }} itemSpacing={10} minVizHeight={16} renderValue={draw}
    />
  );
}

function Text({ panel }) {
  return <div className="markdown-html" dangerouslySetInnerHTML={{ __html: renderTextPanelMarkdown(panel.options.content) }} />;
}

function Panel({ panel, frames, range }) {
  const { x, y, w, h } = panel.gridPos;
  const place = { position: 'absolute', left: x * COLUMN + GAP, top: y * ROW + GAP };
  const size = { width: w * COLUMN - GAP, height: h * ROW - GAP };
  if (panel.type === 'row') {
    return <div style={{ ...place, ...size, ...theme.typography.h5, lineHeight: `${size.height}px` }}>{panel.title}</div>;
  }
  const draw = {
    bargauge: (inner) => <Bars {...{ panel, frames }} {...inner} />,
    stat: (inner) => <Stat {...{ panel, frames }} {...inner} />,
    table: (inner) => <Table data={frames[0]} {...inner} initialSortBy={panel.options.sortBy} />,
    text: () => <Text panel={panel} />,
    timeseries: (inner) => (
      <TimeSeries {...{ frames, timeRange: range, timeZone: 'utc' }} {...inner} legend={panel.options.legend} />
    ),
  }[panel.type];
  if (!draw) {
    throw new Error(`no component for a panel of type ${panel.type}`);
  }
  const unknown = unknownSettings(panel);
  if (unknown.length) {
    throw new Error(`${panel.title}: settings that would not be drawn: ${unknown}`);
  }
  return (
    <div style={place}>
      <PanelChrome {...size} title={panel.title}>{(width, height) => draw({ width, height })}</PanelChrome>
    </div>
  );
}

function Dashboard({ picture }) {
  const { dashboard, frames, from, to, caption } = picture;
  const range = { from: dateTime(from), to: dateTime(to), raw: { from: dateTime(from), to: dateTime(to) } };
  const [drawn, setDrawn] = useState(false);
  useLayoutEffect(() => setDrawn(true), []); // components that measure themselves want a second look
  const height = Math.max(...dashboard.panels.map(({ gridPos }) => gridPos.y + gridPos.h)) * ROW + GAP;
  return (
    <div style={{ position: 'relative', width: 24 * COLUMN + GAP, background: theme.colors.background.canvas }}>
      <header style={{ padding: '14px 10px 6px' }}>
        <span style={{ ...theme.typography.h3 }}>{dashboard.title}</span>
        <span style={{ marginLeft: 16, color: theme.colors.text.secondary }}>{caption}</span>
      </header>
      <main style={{ position: 'relative', height }}>
        {dashboard.panels.map((panel) => (
          <Panel key={`${panel.id}${drawn}`} panel={panel} frames={frames[panel.id]} range={range} />
        ))}
      </main>
    </div>
  );
}

const tell = (path, what) => fetch(path, { method: 'POST', body: JSON.stringify(what) });
window.addEventListener('error', (event) => tell('/error', String(event.error?.stack ?? event.message)));
window.addEventListener('unhandledrejection', (event) => tell('/error', String(event.reason?.stack ?? event.reason)));

const picture = await (await fetch('/picture.json')).json();
picture.frames = {};
for (const panel of picture.dashboard.panels) {
  picture.frames[panel.id] = await framesOf(panel, picture.answers[panel.id]);
}
await document.fonts.ready;
createRoot(document.getElementById('root')).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <Dashboard picture={picture} />
    <PortalContainer />
  </ThemeContext.Provider>
);
// What was drawn, once it is: every canvas of uPlot and every value.
setTimeout(() => {
  const root = document.getElementById('root');
  tell('/drawn', {
    height: root.scrollHeight,
    charts: root.querySelectorAll('canvas').length,
    text: root.innerText,
  });
}, 1500);
