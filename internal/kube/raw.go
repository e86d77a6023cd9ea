package kube

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// Raw returns what the API server answers to a GET of path, as JSON; nil if it does not know the
// path.
func (c *Client) Raw(ctx context.Context, path string) ([]byte, error) {
	raw, err := c.coreREST.CoreV1REST().Get().AbsPath(path).SetHeader("Accept", "application/json").Do(ctx).Raw()
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("get %s: %w", path, err)
	}
	return raw, nil
}
