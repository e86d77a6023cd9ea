package lab

import "context"

type chart struct{}
type Agent struct{}

func (l *Lab) renderChart(ctx context.Context, helm string) (*chart, error) { return nil, nil }
func (l *Lab) installChart(ctx context.Context, c *chart) error             { return nil }
func buildPrograms(ctx context.Context, repo string, progress func(string)) (string, error) { return "", nil }
