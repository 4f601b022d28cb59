// The types that a dashboard's JSON is checked against: Grafana's own, from @grafana/schema.

import type { Dashboard, DataQuery, FieldConfig, Panel } from '@grafana/schema';
import type * as bargauge from '@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen';
import type * as gauge from '@grafana/schema/dist/esm/raw/composable/gauge/panelcfg/x/GaugePanelCfg_types.gen';
import type * as heatmap from '@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen';
import type * as stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as table from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type * as text from '@grafana/schema/dist/esm/raw/composable/text/panelcfg/x/TextPanelCfg_types.gen';
import type * as timeseries from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

// A type as JSON has it: an enumeration of texts becomes the texts. Numeric ones take their numbers as they are.
type Json<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Json<T[K]> } : T;

// What is left out, Grafana fills in with the panel's defaults; what is there must be right.
type Partly<T> = T extends Array<infer U> ? Array<Partly<U>> : T extends object ? { [K in keyof T]?: Partly<T[K]> } : T;

// No panel outside this list: add it here with its options' and its fields' types.
interface Panels {
  bargauge: [bargauge.Options, Record<string, never>];
  gauge: [gauge.Options, Record<string, never>];
  heatmap: [heatmap.Options, heatmap.FieldConfig];
  stat: [stat.Options, Record<string, never>];
  table: [table.Options, table.FieldConfig];
  text: [text.Options, Record<string, never>];
  timeseries: [timeseries.Options, timeseries.FieldConfig];
}

export type DashboardJson = Json<Dashboard>;
export type PanelJson = Json<Panel>;
export type Options<Type extends keyof Panels> = Partly<Json<Panels[Type][0]>>;
// How a field is drawn: what every panel knows, and under `custom` what this one does.
export type Field<Type extends keyof Panels> = Partly<
  Json<Omit<FieldConfig, 'custom'>> & { custom: Json<Panels[Type][1]> }
>;
export type Query = Json<DataQuery> & { expr: string };
