package kube

import (
	"context"
	"encoding/json"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// LabelNode sets a label of a Node, or removes it if value is nil, which is no error if the Node
// does not have it.
func (c *Client) LabelNode(ctx context.Context, node, label string, value *string) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]*string{label: value}}})
	if err != nil {
		return err
	}
	_, err = c.core.Nodes().Patch(ctx, node, types.MergePatchType, patch,
		metav1.PatchOptions{FieldManager: c.userAgent})
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("there is no Node %s", node)
	}
	return c.looked(err, "patch", "", "nodes", "")
}
